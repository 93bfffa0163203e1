"""Natural keys: what makes an event the same event when it arrives again.

A key is derived from the kind and its ordinals, never from a clock, an attempt (but for
placements) or a random number. It is unique within its session; `<session id>/<key>` names an
event anywhere, and is what `dsec why` takes.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

from pydantic import AfterValidator

SESSION_AGE_MAX = timedelta(days=3650)
SESSION_AHEAD_MAX = timedelta(days=1)
SESSION_EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

SYSTEM_SESSION = UUID("016f5e66-e800-7000-8000-000000000000")
"""Events about no session (specs, policies, fences, rejections) are logged under this id, whose
time is 2020-01-01T00:00:00Z."""


def session_time(session_id: UUID) -> datetime:
    """The creation time that a UUIDv7 carries, exact to the millisecond, in UTC.

    Raises:
        OverflowError: it lies behind the year 9999, as in an id that is none.
    """
    return _UNIX_EPOCH + timedelta(milliseconds=session_id.int >> 80)


def check_session_id(value: UUID) -> UUID:
    """Refuse an id that is not a UUIDv7, or whose time cannot be a session's.

    The upper bound needs a clock and is the scheduler's to check (`check_session_window`).
    """
    if value.version != 7:
        raise ValueError(f"{value} is not a UUIDv7 (its version is {value.version})")
    if value.int >> 80 > 253_402_300_799_000 or session_time(value) < SESSION_EARLIEST:
        raise ValueError(f"{value} carries a time outside the years 2020 to 9999")
    return value


def check_session_window(value: UUID, now: datetime) -> str | None:
    """Why a new session may not carry this id's time, or None.

    A session is partitioned by the time in its id, so a clock that is decades off would make a
    partition of its own.
    """
    at = session_time(value)
    if at > now + SESSION_AHEAD_MAX:
        return f"{value} carries {at:%Y-%m-%d}, more than {SESSION_AHEAD_MAX.days} day ahead"
    if at < now - SESSION_AGE_MAX:
        return f"{value} carries {at:%Y-%m-%d}, more than {SESSION_AGE_MAX.days} days ago"
    return None


ORDINAL_MAX = 2**31 - 1
"""What steps, attempts and revisions can count to: they are int32 in columns and in the log."""


def check_ordinal(value: int) -> int:
    """Refuse a number that no column holds."""
    if not -ORDINAL_MAX <= value <= ORDINAL_MAX:
        raise ValueError(f"{value} is beyond what is counted, {ORDINAL_MAX}")
    return value


Ordinal = Annotated[int, AfterValidator(check_ordinal)]


def _own_session(value: UUID) -> UUID:
    if value == SYSTEM_SESSION:
        raise ValueError(f"{value} stands for events about no session")
    return check_session_id(value)


SessionId = Annotated[UUID, AfterValidator(_own_session)]

REQUESTED = "requested"
CANCEL_REQUESTED = "cancel_requested"
STARTED = "started"
ENDED = "ended"
SANITY_CHECKED = "sanity_checked"


def step(n: int) -> str:
    """The key of environment step `n`, counted from 0 over the whole session."""
    return f"step:{n}"


def reward(n: int, revision: int = 1) -> str:
    """The key of one revision of the reward of step `n`."""
    return f"reward:{n}.{revision}"


def rescore_requested(revision: int) -> str:
    """The key of the request that a session's rewards be scored anew, as this revision."""
    return f"rescore_requested:{revision}"


def rescored(revision: int) -> str:
    """The key of what came of scoring a session's rewards anew."""
    return f"rescored:{revision}"


def reward_deferred(n: int) -> str:
    """The key of the notice that the reward of step `n` comes later."""
    return f"reward_deferred:{n}"


def reward_missing(n: int) -> str:
    """The key of the notice that the reward of step `n` will not come."""
    return f"reward_missing:{n}"


TURNS_PER_STEP_MAX = 255
"""Tool turns at one step; with the one that the step itself may be, 256."""
CALLS_PER_TURN_MAX = 64
_TURN_BITS, _CALL_BITS = 8, 8


def tool_call(step: int, turn: int) -> str:
    """The key of the tool calls of one turn at a step."""
    return f"tool_call:{step}.{turn}"


def tool_begun(step: int, turn: int, index: int) -> str:
    """The key of the note that a call that must not be made twice is about to be made."""
    return f"tool_begun:{step}.{turn}.{index}"


def tool_retried(step: int, turn: int, index: int, attempt: int) -> str:
    """The key of the note that an attempt of a call failed and another follows."""
    return f"tool_retried:{step}.{turn}.{index}.{attempt}"


def tool_result(step: int, turn: int, index: int) -> str:
    """The key of what came of one call, result or failure."""
    return f"tool_result:{step}.{turn}.{index}"


def call_id(step: int, turn: int, index: int) -> str:
    """The id of a call, unique in its session; agents know the call by it."""
    return f"call_{step}_{turn}_{index}"


def call_ordinal(step: int, turn: int, index: int) -> int:
    """A call as one number: calls of a session are in the order of their numbers."""
    return (step << _TURN_BITS | turn) << _CALL_BITS | index


def curriculum(n: int) -> str:
    """The key of a session's `n`th change of its curriculum level, from 1."""
    return f"curriculum:{n}"


def anchor(position: int) -> str:
    """The key of the anchor that was taken behind so many steps."""
    return f"anchor:{position}"


def anchor_result(position: int) -> str:
    """The key of what became of an anchor's blob, stored or lost."""
    return f"anchor_result:{position}"


def placed(attempt: int) -> str:
    """The key of a placement; attempts count from 1."""
    return f"placed:{attempt}"


def released(attempt: int) -> str:
    """The key of a worker's giving up of an attempt."""
    return f"released:{attempt}"


def resumed(attempt: int) -> str:
    """The key of an attempt's coming back."""
    return f"resumed:{attempt}"


def rejected(event_id: str) -> str:
    """The key of a rejection: the id of the event that was rejected."""
    return f"rejected:{event_id}"


def fenced(worker: str) -> str:
    """The key of a worker's fence; a worker is fenced once."""
    return f"fenced:{worker}"


def spec(spec_hash: str) -> str:
    """The key of a spec: its content hash."""
    return f"spec:{spec_hash}"


def policy(name: str, version: str) -> str:
    """The key of one version of a policy's weights."""
    return f"policy:{name}.{version}"


def service(name: str, version: int) -> str:
    """The key of one declaration of an outside service."""
    return f"service:{name}.{version}"


def service_mode(name: str, since_ms: int) -> str:
    """The key of one switch of an outside service between synchronous and deferred rewards."""
    return f"service_mode:{name}.{since_ms}"


def of(session_id: UUID, key: str) -> str:
    """`<session id>/<key>`: the name of an event anywhere."""
    return f"{session_id}/{key}"
