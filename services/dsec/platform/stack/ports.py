"""Which TCP ports the embedded servers take.

Fixed ports collide on shared machines, so by default a free one is picked once and remembered in
the state directory: addresses then stay the same from start to start. A port that the user named
is theirs: when it is busy, that is an error; a remembered one is only replaced.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import psutil

from dsec.platform.stack.errors import StackError

LOOPBACK = "127.0.0.1"
PORT_MAX = 65535


def choose_port(
    server: str,
    *,
    given: int | None,
    remembered: int | None,
    on_progress: Callable[[str], None],
) -> int:
    """The port `server` shall listen on; StackError when the given one cannot be had."""
    if given is not None:
        _require_bindable(server, given)
        return given
    if remembered is not None:
        if bind_error(remembered) is None:
            return remembered
        port = free_port()
        on_progress(
            f"Port {remembered}, which {server} had before, is taken{_by_whom(remembered)}; "
            f"it now listens on port {port}."
        )
        return port
    return free_port()


def free_port() -> int:
    """A port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def bind_error(port: int) -> OSError | None:
    """Why a server could not listen on this port of loopback now, or None if it could."""
    with socket.socket() as probe:
        # As the servers do it: connections of an earlier run that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return error
    return None


def _require_bindable(server: str, port: int) -> None:
    if not 0 < port <= PORT_MAX:
        raise StackError(
            f"Port {port}, given for {server}, is no port: give one from 1 to {PORT_MAX}, or none."
        )
    error = bind_error(port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise StackError(
            f"Port {port} on {LOOPBACK}, given for {server}, is taken{_by_whom(port)}: stop what "
            "listens there, give another port, or give none and a free one is picked."
        )
    raise StackError(
        f"Port {port} on {LOOPBACK}, given for {server}, cannot be used ({error.strerror}): "
        "give another port, or give none and a free one is picked."
    )


def _by_whom(port: int) -> str:
    """ " by nats-server (pid 12)" where the system lets us see it, otherwise nothing."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name()
                return f" by {name} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
