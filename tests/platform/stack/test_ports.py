"""Ports: a given one is the user's, a remembered one is only a habit."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.ports import LOOPBACK, choose_port, free_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_given_port_is_an_error_that_names_it_and_its_holder(busy_port: int) -> None:
    with pytest.raises(StackError, match=f"Port {busy_port} on 127.0.0.1, given for nats") as info:
        choose_port("nats", given=busy_port, remembered=None, on_progress=print)
    assert "give another port" in str(info.value)
    assert f"pid {os.getpid()}" in str(info.value)


def test_a_busy_remembered_port_is_replaced_and_said(busy_port: int) -> None:
    said: list[str] = []
    port = choose_port("nats", given=None, remembered=busy_port, on_progress=said.append)
    assert port != busy_port
    assert len(said) == 1
    assert f"Port {busy_port}, which nats had before, is taken" in said[0]


def test_a_free_remembered_port_is_kept() -> None:
    remembered = free_port()
    assert choose_port("nats", given=None, remembered=remembered, on_progress=print) == remembered


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(StackError, match="is no port"):
        choose_port("nats", given=port, remembered=None, on_progress=print)
