"""The tool calls of a lane, on their way to the tool service.

They are messages of their own, one a turn, and not columns: a call takes longer than its message.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import NamedTuple

from dsec.env_runtime.seats import Seat
from dsec.platform.bus import Bus, TooLarge
from dsec.platform.clock import utc_now
from dsec.session.io import Called
from dsec.session.tools import called_fact
from dsec_contracts import ToolCalled, keys
from dsec_contracts.tool import ToolCalledCircumstance, ToolUse

PUBLISHES_IN_FLIGHT_MAX = 64


class _Call(NamedTuple):
    seat: Seat
    turn: Called
    again: bool


class Calls:
    """Turns that wait to be published. True while there are any."""

    def __init__(self, bus: Bus, lane: str, worker: str) -> None:
        self._bus = bus
        self._lane = lane
        self._worker = worker
        self._waiting: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, seat: Seat, turn: Called, *, again: bool) -> None:
        """A turn to publish; `again` where it may have been published before."""
        self._waiting.append(_Call(seat, turn, again))

    async def publish(self) -> list[tuple[Seat, str]]:
        """Publish them all. Returns the seats whose turns fit no message, and why.

        Raises:
            PublishRefused: the worker was fenced.
        """
        waiting, self._waiting = self._waiting, []
        # What was answered or cancelled meanwhile is nobody's any more.
        live = [call for call in waiting if call.seat.machine.asks(call.turn)]
        failed: list[tuple[Seat, str]] = []
        for start in range(0, len(live), PUBLISHES_IN_FLIGHT_MAX):
            some = live[start : start + PUBLISHES_IN_FLIGHT_MAX]
            told = await asyncio.gather(*map(self._publish, some))
            failed += [(call.seat, why) for call, why in zip(some, told, strict=True) if why]
        return failed

    async def _publish(self, call: _Call) -> str | None:
        """Publish one; why it fits no message, or None."""
        seat, turn, again = call
        session_id, attempt = seat.placed.session_id, seat.placed.attempt
        before = seat.call_counts.before(turn)
        event = ToolCalled(
            fact=called_fact(session_id, turn),
            circumstance=ToolCalledCircumstance(
                worker=self._worker,
                lane=self._lane,
                attempt=attempt,
                again=again,
                tools={one.name: _use(seat, one.name, before[one.name]) for one in turn.calls},
                calls_before=before.total(),
                calls_max=seat.calls_max,
            ),
        )
        try:
            await self._bus.publish(
                event,
                session_id,
                source=f"dsec/env-runtime/{self._worker}",
                time=utc_now(),
                event_id=f"{session_id}.tool_call.{turn.step}.{turn.turn}.{attempt}.{seat.repeats}",
                session_id=session_id,
                cause=keys.of(session_id, turn.cause.decode()),
                fence=self._worker,
            )
        except TooLarge as error:
            return str(error)
        seat.published_ns = monotonic_ns()
        return None


def _use(seat: Seat, name: str, calls_before: int) -> ToolUse:
    """How the session uses a tool, now that it has called it so often."""
    use = seat.tools[name]
    return use.model_copy(update={"calls_before": calls_before}) if calls_before else use
