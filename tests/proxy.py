"""A TCP proxy that can fall silent, or break what goes through it."""

import socket
import threading
from contextlib import suppress


class Proxy:
    """Passes connections to its port on to `port`; both on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stall(self) -> None:
        """Nothing passes any longer, in neither direction; no one is told."""
        self._flows.clear()

    def flow(self) -> None:
        """All passes again, what was held back first."""
        self._flows.set()

    def cut(self) -> None:
        """Break what goes through it; new connections are passed on."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it; waits for its threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.flow()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self._sockets.append(near)
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            self._sockets.append(far)
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._copy, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
