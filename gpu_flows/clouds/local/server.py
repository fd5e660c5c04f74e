"""The one process that is a local box: it answers SSH on loopback and runs what it is asked to run.

``python -m gpu_flows.clouds.local.server --root DIR`` serves the box whose files lie in DIR (see
`gpu_flows.clouds.local.layout`); at the least DIR holds ``authorized_key``. When ``endpoint.json`` appears
there, the box answers. Login is by that one key, with any user name and no password. Commands run by
``/bin/sh -c`` in the box's own environment; there is no SFTP and no forwarding. The process ends when
``authorized_key`` goes away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_flows.clouds.local.files import write_atomically, write_json
from gpu_flows.clouds.local.layout import MARKER, USERNAME, BoxFolder, box_environment
from gpu_flows.clouds.local.processes import ProcessIdentity, adopt_orphans, end_processes

_WATCH_S = 1.0
_WINDOW_BYTES = 4 << 20


def main() -> None:
    """Serve one box until it ends."""
    arguments = _parse()
    _reset_process()
    starter = _detach() if arguments.detach else None
    folder = BoxFolder(arguments.root.resolve())
    adopt_orphans()
    write_json(folder.server, ProcessIdentity.own().to_json())
    folder.home.mkdir(mode=0o700, exist_ok=True)
    folder.tmp.mkdir(mode=0o700, exist_ok=True)
    if arguments.become:
        # From here on the box exists, and it already has the process that will start its dead-man.
        final = BoxFolder(arguments.become.absolute())
        folder.path.rename(final.path)
        folder = final
    os.chdir(folder.path)
    environment = box_environment(folder, arguments.id or folder.path.name)
    boot = _start_boot_script(folder, environment)
    if starter is not None:
        _let_go(starter, folder)
    asyncio.run(_serve(folder, arguments.address, environment, boot))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve one local box over SSH.")
    parser.add_argument("--root", type=Path, required=True, help="folder of the box")
    parser.add_argument("--become", type=Path, help="rename the folder to this first: the box is born")
    parser.add_argument("--id", help="id of the box; the folder's name by default")
    parser.add_argument("--address", default="127.0.0.1", help="loopback address to listen on")
    parser.add_argument("--detach", action="store_true", help="go on in the background once the box exists")
    return parser.parse_args()


def _reset_process() -> None:
    """Undo what a starter may have set for itself: a create is shielded from signals there."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)


def _detach() -> int:
    """Leave the starter: a child of our own goes on, in a session of its own.

    The process that was started stays until the child lets it go or ends, and ends as it did, so that the
    starter learns of a failure. No process of a box is ever a child of the orchestrator, where it would
    be left as a zombie.

    Returns:
        The end of a pipe by which the child lets it go.
    """
    ready, let_go = os.pipe()
    child = os.fork()
    if child:
        os.close(let_go)
        if os.read(ready, 1):
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256 or 1)
    os.close(ready)
    os.setsid()
    return let_go


def _let_go(starter: int, folder: BoxFolder) -> None:
    """Turn away from the starter's descriptors, and let it return: the box exists."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder.server_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    with contextlib.suppress(BrokenPipeError):  # whoever waited was killed; the box exists all the same
        os.write(starter, b".")
    os.close(starter)


def _start_boot_script(folder: BoxFolder, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    if not folder.boot_script.exists():
        return None
    with folder.boot_log.open("ab") as log:
        return subprocess.Popen(
            ["/bin/sh", str(folder.boot_script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder.home,
            start_new_session=True,
        )


async def _serve(
    folder: BoxFolder, address: str, environment: dict[str, str], boot: subprocess.Popen[bytes] | None
) -> None:
    import asyncssh

    from gpu_flows.clouds.local.children import Children
    from gpu_flows.clouds.local.sessions import BoxServer, Host

    children = Children(asyncio.get_running_loop())
    if boot is not None:
        children.watch(boot)
    if not folder.host_key.exists():
        key = asyncssh.generate_private_key("ssh-ed25519")
        write_atomically(folder.host_key, key.export_private_key().decode("ascii"))
    host_key = asyncssh.read_private_key(folder.host_key)
    host = Host(environment=environment, home=folder.home, children=children)

    async def listen(on: str) -> Any:
        return await asyncssh.listen(
            on,
            0,
            server_host_keys=[host_key],
            authorized_client_keys=asyncssh.import_authorized_keys(folder.authorized_key.read_text("utf-8")),
            server_factory=lambda: BoxServer(host),
            encoding=None,
            line_editor=False,
            agent_forwarding=False,
            x11_forwarding=False,
            gss_host=None,
            compression_algs=None,
            window=_WINDOW_BYTES,
        )

    try:
        server = await listen(address)
    except OSError as error:
        # Some sandboxes give the loopback device one address only.
        print(f"{address}: {error}; using 127.0.0.1", file=sys.stderr)  # noqa: T201  (the box's own log)
        server = await listen("127.0.0.1")
    bound, port = server.sockets[0].getsockname()[:2]
    public = host_key.export_public_key().decode("ascii").split()
    write_json(
        folder.endpoint,
        {"host": bound, "port": port, "username": USERNAME, "host_key": " ".join(public[:2])},
    )
    while folder.authorized_key.exists():
        await asyncio.sleep(_WATCH_S)
    # Somebody removed the box's files without ending it: nothing of it may go on.
    end_processes(environment[MARKER], ProcessIdentity.own())
    os._exit(0)


if __name__ == "__main__":
    main()
