"""A server that says bytes and no more: what no HTTP library would let a server say."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

READ_BYTES = 1 << 16

Saying = Callable[[socket.socket, bytes], None]
"""Answers one request, whose head is given, on its connection."""


@dataclass
class RawServer:
    """One that answers by the first segment of the path."""

    sayings: dict[str, Saying]
    url: str = ""
    heads: list[bytes] = field(default_factory=list)
    """Of all requests, as they came."""

    def answer(self, connection: socket.socket) -> None:
        """Read a request's head and answer it. That the other side has gone is no trouble."""
        with connection, contextlib.suppress(OSError):
            head = connection.recv(READ_BYTES)
            self.heads.append(head)
            path = head.split(b" ", 2)[1].decode()
            self.sayings[path.split("/")[-1].partition("?")[0]](connection, head)


@contextlib.contextmanager
def raw_server(sayings: dict[str, Saying]) -> Iterator[RawServer]:
    """Serve on the loopback address, each connection in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RawServer(sayings, f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=server.answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)


def saying(data: bytes) -> Saying:
    """Says it, and closes the connection."""
    return lambda connection, _: connection.sendall(data)


def head(status: str = "200 OK", kind: str = "application/json", *more: str) -> bytes:
    """The head of an answer that the connection's end ends."""
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close", *more, "", "")
    return "\r\n".join(lines).encode("latin-1")
