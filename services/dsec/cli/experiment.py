"""What `demo` and `validate-determinism` have in common: run, disturb, compare, verify."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psutil

from dsec.cli.answer import Refused, progress
from dsec.cli.metrics import reward_share
from dsec.client.client import Client
from dsec.client.queries import Summary
from dsec.client.verification import verify_sessions
from dsec_contracts import BY_TYPE, SessionStepped, subjects
from dsec_contracts.keys import session_time

WAIT_S_MAX = 120.0
KILL_AFTER_STEP = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the log says of sessions that were run and executed again."""

    summaries: list[Summary]
    verdicts: list[dict[str, Any]]

    @property
    def verified(self) -> int:
        """How many verify and have completed."""
        whole = (s.status == "completed" for s in self.summaries)
        return sum(v["ok"] and done for v, done in zip(self.verdicts, whole, strict=True))

    @property
    def rscr(self) -> float | None:
        """See `dsec metrics`."""
        return reward_share(self.verdicts)


class WorkerKiller:
    """Kills the worker that runs some sessions, once they are on their way, as a fault would."""

    def __init__(self) -> None:
        self.killed: str | None = None
        self._sessions: set[bytes] = set()

    async def arm(self, client: Client) -> None:
        """Listen to steps. Before the sessions are requested, or the first ones are missed."""
        bus = await client.bus()
        await bus.listen(subjects.every(SessionStepped.event_name()), self._on_session_stepped)

    def aim(self, sessions: Sequence[UUID]) -> None:
        """The sessions whose worker is meant."""
        self._sessions = {session_id.bytes for session_id in sessions}

    async def _on_session_stepped(self, headers: Mapping[str, str], data: bytes) -> None:
        if self.killed is not None or not self._sessions:
            return
        event = BY_TYPE[SessionStepped.event_type()].model_validate_json(data)
        assert isinstance(event, SessionStepped)
        rows = [event.row.session_id[n : n + 16] for n in range(0, 16 * event.rows, 16)]
        steps = memoryview(event.row.step).cast("i")
        pairs = zip(rows, steps, strict=True)
        if any(i in self._sessions and step >= KILL_AFTER_STEP for i, step in pairs):
            self._kill(event.circumstance.worker)

    def _kill(self, worker: str) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
                if worker in process.cmdline():
                    process.kill()
                    self.killed = worker
                    return


async def follow(client: Client, ids: Sequence[UUID], say: Callable[[str], None]) -> Outcome:
    """Wait until the sessions are over, then execute each again."""
    with progress() as display:
        running = display.add_task("sessions over", total=len(ids))
        try:
            summaries = await client.wait(
                ids,
                timeout_s=WAIT_S_MAX,
                on_progress=lambda done: display.update(running, completed=done),
            )
        except TimeoutError:
            raise Refused(
                f"the sessions are not over after {WAIT_S_MAX:.0f} s: `dsec status` shows whether "
                "all services run, and their logs say why not"
            ) from None
        say("All sessions are over; executing each again from its log …")
        verified = display.add_task("verified", total=len(ids))
        verdicts = await verify_sessions(
            client, ids, lambda done: display.update(verified, completed=done)
        )
    return Outcome(summaries, verdicts)


async def identical_at_every_step(client: Client, ids: Sequence[UUID], steps: int) -> int:
    """How many of the sessions have, at each of `steps` steps, the chain hash of the first one."""
    chains = [await _chains(client, session_id) for session_id in ids]
    return sum(len(chain) == steps and chain == chains[0] for chain in chains)


async def _chains(client: Client, session_id: UUID) -> list[str]:
    rows = await client.queries.rows(
        "select chain_hash from step_trace where session_id = :id and session_at = :at "
        "order by step",
        id=session_id,
        at=session_time(session_id),
    )
    return [row.chain_hash for row in rows]


def problems(outcome: Outcome) -> list[str]:
    """A sentence for each session that is not as it should be."""
    found = []
    for summary, verdict in zip(outcome.summaries, outcome.verdicts, strict=True):
        if summary.status != "completed":
            found.append(f"{summary.session_id} ended {summary.status}: {summary.code}")
        elif not verdict["ok"]:
            first = verdict["first_divergence"] or {"step": None, "field": verdict["error"]}
            found.append(f"{summary.session_id} diverged at {first['step']}: {first['field']}")
    return found
