"""One attempt to log in to a box: no more than its deadlines, and an error that says what kind it is."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.remote.errors import HostKeyChanged, SshAuthenticationFailed, SshError, SshUnreachable
from gpu_flows.remote.hostkeys import algorithms_for, same_key

# gcm first: 188 instead of 129 MB/s for a log, measured on loopback.
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes256-ctr",
    "aes192-ctr",
    "aes128-ctr",
)

_CONNECTS_AT_ONCE = 8
"""Stock sshd starts to refuse at ten unauthenticated connections: 123 of 200 simultaneous ones were lost, and
none with eight at a time."""
_JITTER_S = 0.05

# How much may be on its way. Measured with aes128-gcm: over 50 ms of round trip 16 MiB carry 161 MB/s, 8 MiB 80
# and asyncssh's own 2 MiB 20; next door 8 MiB carry 450 MB/s and 16 MiB, which fall out of the caches, 173.
_NEAR_S = 0.01
_NEAR_WINDOW_BYTES = 8 << 20
_FAR_WINDOW_BYTES = 16 << 20

_turnstiles = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """How patient a connection is.

    Attributes:
        connect_timeout_s: Until TCP is up.
        login_timeout_s: From there until logged in.
        keepalive_s: Between questions to a silent peer.
        keepalive_count: Unanswered questions until the connection counts as lost.
    """

    connect_timeout_s: float = 15
    login_timeout_s: float = 30
    keepalive_s: float = 5
    keepalive_count: int = 3


@dataclass(slots=True)
class Login:
    """A connection that is logged in.

    Attributes:
        endpoint: Where it leads, host keys pinned.
        connection: asyncssh's connection.
        window_bytes: How much a channel lets the box send ahead.
        through: The connection to the jump host, where there is one.
    """

    endpoint: SshEndpoint
    connection: Any
    window_bytes: int
    through: Login | None = None

    @property
    def alive(self) -> bool:
        """Whether nothing has been heard of its end."""
        return not self.connection.is_closed() and (self.through is None or self.through.alive)

    def abort(self) -> None:
        """Drop it without a word."""
        self.connection.abort()
        if self.through is not None:
            self.through.abort()

    async def close(self, timeout_s: float) -> None:
        """Say goodbye, for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                self.connection.close()
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()
        if self.through is not None:
            await self.through.close(timeout_s)


async def log_in(endpoint: SshEndpoint, keys: Sequence[Any], options: ConnectOptions) -> Login:
    """Connect and authenticate, through the jump host where there is one.

    Args:
        endpoint: Where to; a pinned host key in it is compared, a missing one is pinned.
        keys: Private keys, as `asyncssh.import_private_key` returns them, in the order in which they are tried.
        options: Deadlines and keepalive.

    Raises:
        SshUnreachable: Nothing answers SSH there; retryable.
        SshAuthenticationFailed: The key is not accepted.
        HostKeyChanged: Another host key than the pinned one.
    """
    through = await log_in(endpoint.proxy, keys, options) if endpoint.proxy else None
    try:
        async with _turnstile():
            await asyncio.sleep(random.uniform(0, _JITTER_S))  # noqa: S311 - spreads load, guards nothing
            connection, shown, round_trip_s = await _attempt(endpoint, keys, options, through)
    except BaseException:
        if through is not None:
            through.abort()
        raise
    pinned = dataclasses.replace(
        endpoint, host_key=endpoint.host_key or shown, proxy=through.endpoint if through else None
    )
    window_bytes = _NEAR_WINDOW_BYTES if round_trip_s < _NEAR_S else _FAR_WINDOW_BYTES
    return Login(pinned, connection, window_bytes, through)


async def _attempt(
    endpoint: SshEndpoint, keys: Sequence[Any], options: ConnectOptions, through: Login | None
) -> tuple[Any, str, float]:
    """Return the connection, the host key it showed, and the seconds that TCP took to connect."""
    import asyncssh
    from asyncssh.packet import PacketDecodeError  # what garbage in place of a packet raises

    _quieten_asyncssh()
    loop = asyncio.get_running_loop()
    started = loop.time()
    connected: list[float] = []
    shown: list[str] = []

    class Client(asyncssh.SSHClient):  # type: ignore[misc]
        def connection_made(self, _conn: Any) -> None:
            connected.append(loop.time())
            deadline.reschedule(loop.time() + options.login_timeout_s)

        def validate_host_public_key(self, _host: str, _addr: str, _port: int, host_key: Any) -> bool:
            # Called for a key that mismatches the pinned one too, and True would accept it.
            shown.append(host_key.export_public_key("openssh").decode().strip())
            return endpoint.host_key is None or same_key(endpoint.host_key, shown[-1])

    where = _where(endpoint)
    try:
        async with asyncio.timeout(options.connect_timeout_s) as deadline:
            connection = await asyncssh.connect(
                endpoint.host,
                endpoint.port,
                username=endpoint.username,
                client_factory=Client,
                client_keys=list(keys),
                known_hosts=([], [], []),  # every key goes through Client, none through the user's file
                server_host_key_algs=algorithms_for(endpoint.host_key),
                encryption_algs=list(_CIPHERS),
                compression_algs=["none"],
                preferred_auth=["publickey"],
                config=None,
                agent_path=None,
                tunnel=through.connection if through else (),
                keepalive_interval=options.keepalive_s,
                keepalive_count_max=options.keepalive_count,
                login_timeout=0,  # ours: it says what it waited for
            )
    except TimeoutError as exc:
        if connected:
            what = f"{where} takes TCP connections but did not finish the login"
            waited_s = options.login_timeout_s
        else:
            what = f"{where} does not answer"
            waited_s = options.connect_timeout_s
        raise SshUnreachable(f"{what} within {waited_s:g} s") from exc
    except OSError as exc:
        raise _unreachable(where, exc) from exc
    except (asyncssh.Error, PacketDecodeError) as exc:
        raise _classified(endpoint, where, exc, shown) from exc
    return connection, shown[-1], connected[-1] - started


def is_loopback(endpoint: SshEndpoint) -> bool:
    """Tell whether an endpoint is on this machine, where neither politeness nor compression pays."""
    return endpoint.proxy is None and (
        endpoint.host in ("localhost", "::1") or endpoint.host.startswith("127.")
    )


def _turnstile() -> asyncio.Semaphore:
    """Return the semaphore that every login of this loop passes; a process has one loop that logs in."""
    loop = asyncio.get_running_loop()
    return _turnstiles.setdefault(loop, asyncio.Semaphore(_CONNECTS_AT_ONCE))


def _quieten_asyncssh() -> None:
    """Keep its account of every channel out of a task's log, unless somebody asked for it."""
    logger = logging.getLogger("asyncssh")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def _where(endpoint: SshEndpoint) -> str:
    return f"{endpoint.username}@{endpoint.host}:{endpoint.port}"


def _unreachable(where: str, exc: OSError) -> SshUnreachable:
    if isinstance(exc, ConnectionRefusedError):
        return SshUnreachable(f"{where} refuses connections: no SSH server listens there yet")
    if isinstance(exc, socket.gaierror):
        return SshUnreachable(f"the host name of {where} does not resolve: {exc.strerror}")
    return SshUnreachable(f"{where} cannot be reached: {exc}")


def _classified(endpoint: SshEndpoint, where: str, exc: Exception, shown: list[str]) -> SshError:
    import asyncssh

    if isinstance(exc, asyncssh.HostKeyNotVerifiable) and endpoint.host_key and shown:
        return HostKeyChanged(
            f"{where} is not the machine it was: it shows the host key {shown[-1]}, "
            f"but {endpoint.host_key} was pinned at the first contact",
            hint="the address was given to another machine, or someone sits in between; destroy the box",
        )
    if isinstance(exc, asyncssh.PermissionDenied):
        return SshAuthenticationFailed(
            f"{where} does not accept our key: {exc.reason}",
            hint="the key may not be installed yet, or the user name is another",
        )
    if isinstance(exc, (asyncssh.KeyExchangeFailed, asyncssh.HostKeyNotVerifiable)):
        return SshError(f"{where} and we have no way to talk in common: {exc}")
    if isinstance(exc, asyncssh.ChannelOpenError):
        return SshUnreachable(f"the jump host cannot reach {where}: {exc.reason}")
    return SshUnreachable(f"{where} hung up before the login was done: {exc}")
