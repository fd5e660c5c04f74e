"""A fixed port in front of a box: for clouds whose API tells an address and no port."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading

from gpu_flows.endpoint import SshEndpoint


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Forwarder:
    """Listens on a port of a box's own address, and hands each connection on to where the box listens.

    Args:
        box: Where the box listens.
        port: Where to listen, at the same address.
    """

    def __init__(self, box: SshEndpoint, port: int) -> None:
        target = (box.host, box.port)

        class Hand(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError), socket.create_connection(target, 10) as far:
                    far.settimeout(None)
                    back = threading.Thread(target=_pump, args=(far, self.request), daemon=True)
                    back.start()
                    _pump(self.request, far)
                    back.join()

        self._server = _Server((box.host, port), Hand)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
