"""What a worker says of its sessions: that they started, came back, ended, or are handed back.

All of it goes out behind the worker's fence, and is the same event however often it is sent.
"""

from __future__ import annotations

from uuid import UUID

from dsec.env_runtime.opening import Opening
from dsec.env_runtime.seats import Seat
from dsec.platform.bus import Author
from dsec.platform.clock import utc_now
from dsec.platform.objects import ObjectStore, put_patiently
from dsec.session.io import Ended
from dsec.session.observations import reference
from dsec_contracts import (
    Event,
    SessionEnded,
    SessionReleased,
    SessionResumed,
    SessionStarted,
    keys,
)
from dsec_contracts.session import (
    EndedCircumstance,
    EndedFact,
    PlacedFact,
    ReleasedCircumstance,
    ReleasedFact,
    ResumedCircumstance,
    ResumedFact,
    StartedCircumstance,
    StartedFact,
)


class Announcer:
    """Publishes in the name of one worker."""

    def __init__(self, author: Author, worker: str, objects: ObjectStore | None) -> None:
        self._author = author
        self._worker = worker
        self._objects = objects

    async def ended(self, placed: PlacedFact, ended: Ended, cause: str) -> None:
        """A session is over. `cause`: the key of what it came after."""
        fact = EndedFact(
            session_id=placed.session_id,
            status=ended.status,
            code=ended.code,
            steps=ended.steps,
            episodes=ended.episodes,
            inputs=ended.inputs,
            chain=ended.chain,
        )
        told = EndedCircumstance(
            attempt=placed.attempt,
            worker=self._worker,
            message=ended.message.encode("utf-8", "replace").decode(),
            at=utc_now(),
        )
        await self._send(
            SessionEnded(fact=fact, circumstance=told),
            placed.session_id,
            f"{placed.session_id}.ended.{placed.attempt}",
            cause,
        )

    async def started(self, seat: Seat, opening: Opening) -> None:
        """A session was reset, and is stepped from now on.

        Raises:
            TooLarge: its first observation and info fit no message.
        """
        started, placed = opening.started, seat.placed
        assert started is not None
        observation = started.observation
        if len(observation) > seat.inline_bytes_max:
            keep = seat.above == "reference" and self._objects is not None
            observation = b""
            if keep and self._objects is not None:
                blob = await put_patiently(self._objects, started.observation)
                observation = reference(blob, len(started.observation))
        event = SessionStarted(
            fact=StartedFact(
                session_id=placed.session_id, reset=started.reset, chain=started.chain
            ),
            circumstance=StartedCircumstance(
                attempt=placed.attempt,
                worker=self._worker,
                determinism=seat.machine.determinism,
                observation=observation,
                fingerprint=_fingerprint_of(seat),
            ),
        )
        await self._send(
            event,
            placed.session_id,
            f"{placed.session_id}.started.{placed.attempt}",
            keys.placed(placed.attempt),
        )

    async def resumed(self, placed: PlacedFact, told: ResumedCircumstance) -> None:
        """A session came back from an anchor, or from step 0 where none was of use."""
        fact = ResumedFact(session_id=placed.session_id, attempt=placed.attempt)
        await self._send(
            SessionResumed(fact=fact, circumstance=told),
            placed.session_id,
            f"{placed.session_id}.resumed.{placed.attempt}",
            keys.placed(placed.attempt),
        )

    async def released(self, placed: PlacedFact, steps: int, reason: str) -> None:
        """A session is handed back, to be placed elsewhere."""
        event = SessionReleased(
            fact=ReleasedFact(session_id=placed.session_id, attempt=placed.attempt),
            circumstance=ReleasedCircumstance(worker=self._worker, steps=steps, reason=reason),
        )
        await self._send(
            event,
            placed.session_id,
            f"{placed.session_id}.released.{placed.attempt}",
            keys.placed(placed.attempt),
        )

    async def _send(self, event: Event, session_id: UUID, event_id: str, cause: str) -> None:
        await self._author.publish(
            event,
            session_id,
            event_id,
            keys.of(session_id, cause),
            session_id=session_id,
        )


def _fingerprint() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        **{name: version(name) for name in ("dsec", "gymnasium", "numpy")},
    }


FINGERPRINT = _fingerprint()


def _fingerprint_of(seat: Seat) -> dict[str, str]:
    uses = seat.undeclared_uses
    return {**FINGERPRINT, "undeclared_uses": uses} if uses else FINGERPRINT
