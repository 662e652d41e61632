"""A tunnel of TCP connections, such as SSH and stunnel make, in this process: it can be cut, restarted and blocked."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Tunnel"]

_CHUNK = 64 << 10


class Tunnel:
    """Passes on what arrives at one address to another one.

    Args:
        entrance: where it listens; port 0 is any free one.
        end: where it leads.
    """

    def __init__(self, entrance: tuple[str, int], end: tuple[str, int]) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.passed = 0
        """Connections that were passed on."""
        self.mute = False
        """Whether connections are accepted, and nothing is passed on: what is behind has vanished."""
        self._listener = socket.create_server(entrance, backlog=128)
        self.entrance: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End it, with all connections."""
        for each in (self._listener, *self._take()):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def restart(self) -> None:
        """Make it again at the same place."""
        self._listener = socket.create_server(self.entrance, backlog=128)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _take(self) -> list[socket.socket]:
        with self._lock:
            taken, self._sockets = self._sockets, []
        return taken

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(near)
            if not self.mute:
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._end)
        except OSError:
            near.close()
            return
        with self._lock:
            self._sockets.append(far)
        self.passed += 1
        back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
        back.start()
        _pass_on(near, far)
        back.join()
        near.close()
        far.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
