"""`await self.call(...)` in an `async def step`: a tool turn from within a decision.

The coroutine of `step` is kept by the machine while the call is made, recorded and answered like
any other that blocks, and goes on with the result. A re-execution makes the same calls and is given
the recorded results, so nothing of the coroutine has to be stored: anchors are taken behind steps,
when no decision is under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any


class Asked:
    """What `call` gives: to be awaited, once, by `step`."""

    __slots__ = ("arguments", "name")

    def __init__(self, name: str, arguments: Mapping[str, Any] | str | None) -> None:
        # Text of the user's own class may say that it equals what it does not.
        self.name = str.__str__(name) if isinstance(name, str) else name
        self.arguments = arguments

    def __await__(self) -> Generator[Asked, Any, Any]:
        return (yield self)


def call(name: str, arguments: Mapping[str, Any] | str | None = None) -> Asked:
    """Call a tool that blocks, in `async def step`: `result = await self.call("model", {...})`.

    Args:
        name: as the agent's spec declares it.
        arguments: a mapping, or JSON text.

    Returns:
        Awaited: what the tool returned, or `{"error": {"code", "message", "retryable"}}`.
    """
    return Asked(name, arguments)


def offer_call(agent: Any) -> None:
    """Give an agent `self.call` unless it has something of that name. Runs user code."""
    if getattr(agent, "call", None) is None:
        # One with slots has no room for it, and can inherit it from `dsec.Agent`.
        with contextlib.suppress(AttributeError):
            agent.call = call
