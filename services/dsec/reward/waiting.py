"""Rows that wait, beside the ticks that pass: for outside services, or to be scored again.

They hold up no other tick. Each is published soon after it is settled, in messages that are named
by its rows, and the tick is acknowledged when all of them are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsec.platform.bus import Later
from dsec.reward.asking import Answered, Asking, Outsides
from dsec.reward.batch import Batch
from dsec.reward.effects import Keep, Spec
from dsec.reward.episodes import Episodes
from dsec.reward.frames import Outcome, Task
from dsec.reward.publishing import Publisher
from dsec.reward.recheck import Recheck
from dsec.reward.settings import RewardSettings
from dsec.reward.turns import Turns
from dsec_contracts import Envelope

LOOK_AGAIN_S = 0.5
"""How soon rows that were asked for when their service was fast learn that it is slow."""
LINGER_S = 0.005
"""Rows that are settled within this of each other travel in one message."""
GATHER_S = 0.5
"""Where calls queue for a service's budget, the rows that were answered within this run again
together, at an instant that all ticks share: sessions that hear together step together, so that
turns and messages carry several of them from then on."""
QUEUE_S_MIN = 2 * GATHER_S
"""How long a queue has to last for that: then an answer that is held costs the budget nothing."""


class Beside(NamedTuple):
    """What rows can wait for."""

    outsides: Outsides
    keep: Keep
    recheck: Recheck
    episodes: Episodes | None = None
    """None: there is no log to read them from."""


class Scored(NamedTuple):
    """A row that has an outcome, and what it was made from."""

    row: int
    task: Task
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """A message, and what its first pass left open: rows that ask services, and by spec, rows that
    are to be scored again before they are believed."""

    envelope: Envelope
    batch: Batch
    specs: Mapping[str, Spec]
    """By hash, of all its rows."""
    asking: dict[int, Asking]
    checking: dict[str, list[Scored]]
    closing: dict[int, int]
    """Rows that close an episode which is rewarded as a whole, each with its first step."""

    @property
    def contents(self) -> dict[str, bytes]:
        """The bytes of its specs, by hash."""
        return {spec_hash: spec.content for spec_hash, spec in self.specs.items()}

    def rows(self) -> list[int]:
        """All that is open."""
        return [*self.asking, *(one.row for rows in self.checking.values() for one in rows)]


class Waiting:
    """The rows that wait at this replica."""

    def __init__(
        self, publisher: Publisher, turns: Turns, beside: Beside, settings: RewardSettings
    ) -> None:
        self._publisher = publisher
        self._turns = turns
        self._outsides, self._keep, self._recheck, _ = beside
        self._settings = settings
        self._at_work: set[tuple[bytes, int, bytes]] = set()
        self._ticks = 0

    def stop(self) -> None:
        """Hand back what has not been begun; see `Outsides.stop`."""
        self._outsides.stop()

    async def settle(self, tick: Tick) -> None:
        """Have the open rows of a tick settled and published.

        Raises:
            Later: too many ticks wait.
        """
        # A lane that heard nothing asks again; what is at work here is answered once.
        names = {n: tick.batch.name(n) for n in tick.rows()}
        rows = {n for n, name in names.items() if name not in self._at_work}
        if not rows:
            return
        if self._ticks >= self._settings.reward_ticks_waiting_max:
            raise Later(self._settings.reward_service_retry_s, "too many ticks wait for services")
        self._at_work.update(names[n] for n in rows)
        self._ticks += 1
        try:
            asking = {n: row for n, row in tick.asking.items() if n in rows}
            later = await self._later(tick, asking)
            await self._publisher.defer(tick.envelope, tick.batch, later)
            work: list[Coroutine[None, None, dict[int, Answered]]] = [
                self._checked(tick, spec, [one for one in scored if one.row in rows])
                for spec, scored in tick.checking.items()
            ]
            for n, row in asking.items():
                work.append(self._answered(tick, n, row._replace(batched=n in later)))
            on_time = {n: row for n, row in asking.items() if n not in later}
            await self._publish_as_they_come(tick, work, self._deferrable(tick, on_time))
        finally:
            self._ticks -= 1
            self._at_work.difference_update(names[n] for n in rows)

    def _deferrable(self, tick: Tick, asking: Mapping[int, Asking]) -> dict[int, Asking]:
        """The rows whose sessions can go on without their rewards."""
        sessions, can = tick.batch.sessions, tick.batch.deferrable
        return {n: row for n, row in sorted(asking.items()) if sessions[n].hex() in can}

    async def _later(self, tick: Tick, asking: Mapping[int, Asking]) -> list[int]:
        """The rows whose rewards are deferred: a service is slow, and their sessions can wait."""
        return [
            n
            for n, row in self._deferrable(tick, asking).items()
            if await self._outsides.is_deferred(row)
        ]

    async def _publish_as_they_come(
        self,
        tick: Tick,
        work: Sequence[Coroutine[None, None, dict[int, Answered]]],
        on_time: dict[int, Asking],
    ) -> None:
        """Publish what is settled. Rows `on_time` are deferred when their service has become slow
        since: a call that hangs must not hold up the session that was the first to make one."""
        running = {asyncio.create_task(one) for one in work}
        errors: list[BaseException] = []
        look_s = LOOK_AGAIN_S if on_time else None
        try:
            while running:
                await asyncio.wait(running, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(LINGER_S)
                found: dict[int, Answered] = {}
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    if (error := task.exception()) is not None:
                        errors.append(error)
                    else:
                        found |= task.result()
                if found:
                    await self._publish(tick, found)
                on_time = {n: row for n, row in on_time.items() if n not in found}
                if running and (later := await self._later(tick, on_time)):
                    await self._publisher.defer(tick.envelope, tick.batch, later)
                    on_time = {n: row for n, row in on_time.items() if n not in later}
                look_s = LOOK_AGAIN_S if on_time else None
        finally:
            for task in running:
                task.cancel()
        if errors:
            raise errors[0]  # the message comes again, for what it has not got

    async def _publish(self, tick: Tick, found: Mapping[int, Answered]) -> None:
        outcomes: list[Outcome | None] = [None] * tick.batch.event.rows
        for n, answered in found.items():
            outcomes[n] = answered.outcome
        responses = {n: answered.responses for n, answered in found.items()}
        await self._publisher.publish(tick.envelope, tick.batch, outcomes, responses)

    async def _answered(self, tick: Tick, n: int, row: Asking) -> dict[int, Answered]:
        spec = row.task.spec
        content = tick.contents[spec]

        async def again(task: Task) -> Outcome:
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep(gather_s(now_s, self._outsides.queue_s(row)))
            return await self._turns.again(task, content)

        found = await self._outsides.answer(row, again)
        if type(found.outcome) is not bytes:
            return {n: await self._keep.kept(found)}
        failure = self._recheck.failure(spec)
        if failure is None and self._recheck.is_due(spec, 1):
            task = row.task._replace(responses=found.responses)
            failure = await self._recheck.differs([task], [found.outcome], tick.contents)
        if failure is not None:
            return {n: await self._keep.kept(Answered(failure, found.responses))}
        return {n: await self._keep.kept(found)}

    async def _checked(
        self, tick: Tick, spec: str, scored: Sequence[Scored]
    ) -> dict[int, Answered]:
        if not scored:
            return {}
        tasks, outcomes = [one.task for one in scored], [one.outcome for one in scored]
        failure = await self._recheck.differs(tasks, outcomes, {spec: tick.contents[spec]})
        return {one.row: Answered(failure or one.outcome, b"") for one in scored}


def gather_s(now_s: float, queue_s: float) -> float:
    """How long an answered row waits for others.

    Args:
        now_s: on any clock, the same for all ticks.
        queue_s: how long the queue lasts in which its session will stand next.
    """
    return GATHER_S - now_s % GATHER_S if queue_s >= QUEUE_S_MIN else 0.0
