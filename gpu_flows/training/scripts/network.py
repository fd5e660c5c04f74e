"""What a box knows of its network, asked on the box itself: Python 3.9 and its standard library.

Usage:
    network.py interface ADDRESS           the interface that leads to an address
    network.py port ADDRESS                a free port, outside the range that outgoing connections use; exit code
                                           3 when the address is not one of the box itself
    network.py listen NONCE SECONDS PEERS  listen in the background, for so long or until so many have called;
                                           prints the port
    network.py dial NONCE SECONDS HOST:PORT...  call the listeners; prints "ok HOST:PORT" or "HOST:PORT reason"
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import time

_SIOCGIFADDR = 0x8915
_PORTS = range(20000, 30000)
_TAKEN_BY_CUSTOM = {29500}  # torchrun's default, where somebody's own run may start a moment later


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def interface(address: str) -> str:
    """Return the name of the interface by which the kernel would send to an address."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = probe.getsockname()[0]
    if own.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        if own in (_ipv4(name), _ipv6(name)):
            return name
    # A second address of an interface: only iproute2 tells.
    listing = subprocess.run(
        ["ip", "-o", "addr", "show", "to", own],  # noqa: S607 - wherever the box has it
        capture_output=True,
        text=True,
        check=True,
    )
    return listing.stdout.split()[1]


def _ipv4(name: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str) -> str | None:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:  # the kernel has no IPv6
        return None
    return next(
        (socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == name), None
    )


def server(port: int) -> socket.socket:
    """Listen on a port of every address, IPv4 and IPv6, as torch's store does."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=False)
    return socket.create_server(("", port))


def free_port() -> int:
    """Return a port that nobody listens on, whatever the address."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if port in _TAKEN_BY_CUSTOM:
            continue
        try:
            server(port).close()
        except OSError:
            continue
        return port
    raise OSError(f"every port from {_PORTS[0]} to {_PORTS[-1]} is taken")


def is_own(address: str) -> bool:
    """Tell whether an address is one of this box itself, and not of a NAT before it."""
    family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(target)
        except OSError:
            return False
    return True


def listen(nonce: str, seconds: float, peers: int) -> None:
    """Answer callers with the nonce from the background; the port is printed before this returns."""
    listener = server(0)
    say(str(listener.getsockname()[1]))
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    end = time.monotonic() + seconds
    while peers > 0 and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(5)
                caller.sendall(nonce.encode())
                peers -= caller.recv(2) == b"ok"
        except OSError:  # one caller gone, or the time is up
            continue
    os._exit(0)


def dial(nonce: str, seconds: float, peer: str) -> str:
    """Call one listener, again until the time is up; return "ok" or why it cannot be reached."""
    host, _, port = peer.rpartition(":")
    end = time.monotonic() + seconds
    reason = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as call:
                answer = call.recv(len(nonce))
                if answer == nonce.encode():
                    call.sendall(b"ok")
                    return "ok"
                reason = "somebody else answers there"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(0.5, max(0.0, end - time.monotonic())))
    return reason


def main(verb: str, *words: str) -> int:
    """Do what the usage says; return the exit code."""
    if verb == "interface":
        say(interface(words[0]))
    elif verb == "port":
        if not is_own(words[0]):
            return 3
        say(str(free_port()))
    elif verb == "listen":
        listen(words[0], float(words[1]), int(words[2]))
    else:
        for peer in words[2:]:
            outcome = dial(words[0], float(words[1]), peer)
            say(f"ok {peer}" if outcome == "ok" else f"failed {peer} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
