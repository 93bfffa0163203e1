"""Admission: whether a request can become a session, and if not, which field is at fault.

Pure: what was asked for before under the same id comes with the command, since old sessions are in
the log and not in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from uuid import UUID

from dsec.scheduler.intents import End, Intent, Reject
from dsec.scheduler.state import SchedulerState
from dsec_contracts import keys
from dsec_contracts.canonical import encode
from dsec_contracts.curriculum import LEVEL_MAX
from dsec_contracts.keys import check_session_window
from dsec_contracts.session import CancelCode, RejectCode, RequestFact, SessionRequested

SPEC_FIELDS = (("agent_spec", "agent"), ("env_spec", "env"), ("reward_fn_hash", "reward"))
RESERVED_FIELDS = ("fork_parent",)


@dataclass(frozen=True, slots=True)
class Prior:
    """What the log knows of an id that memory does not know."""

    facts: bytes | None
    """Digest of the earlier request that has the id; None: the log has no earlier one."""
    refused: bool
    """That request (this one, where there is no earlier one) was rejected."""
    cancel: CancelCode | None = None
    """Somebody asked already that the session stop."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Command: somebody asks for a session. `prior` is what the log knows of the id."""

    event_id: str
    request: RequestFact
    prior: Prior | None = None


@dataclass(frozen=True, slots=True)
class AskMalformed:
    """Command: somebody sent what is no request."""

    event_id: str
    field: str | None
    message: str
    session_id: str | None


def facts_digest(request: RequestFact) -> bytes:
    """What two requests for one id are compared by.

    Raises:
        CanonicalError: a field of a newer version has no canonical form.
    """
    return digest_of(encode(SessionRequested(fact=request).fact_value()))


def digest_of(fact: bytes) -> bytes:
    """The digest of a request whose canonical bytes are known."""
    return sha256(fact).digest()[:16]


def check_request(
    state: SchedulerState, event_id: str, request: RequestFact, now: datetime
) -> Reject | None:
    """The first reason not to admit a request with a new id, or None."""

    def reject(code: RejectCode, field: str, message: str) -> Reject:
        used_up = facts_digest(request)
        return Reject(event_id, code, field, message, str(request.session_id), used_up)

    why = check_session_window(request.session_id, now)
    if why is not None:
        return reject("id_out_of_window", "session_id", why)
    for name in RESERVED_FIELDS:
        if getattr(request, name) is not None:
            return reject(
                "not_implemented", name, f"{name} is reserved and not implemented yet: leave it out"
            )
    level = request.curriculum_level
    if level is not None and not 0 <= level <= LEVEL_MAX:
        return reject(
            "malformed", "curriculum_level", f"curriculum_level must be from 0 to {LEVEL_MAX}"
        )
    for name, kind in SPEC_FIELDS:
        spec_hash = getattr(request, name)
        known = state.specs.get(spec_hash)
        if known is None:
            return reject(
                "unregistered_spec",
                name,
                f"no spec {spec_hash[:12]} is registered; {name} names it",
            )
        if known != kind:
            return reject(
                "wrong_spec_kind",
                name,
                f"{name} needs a spec of kind {kind}; {spec_hash[:12]} is of kind {known}",
            )
    if request.policy is not None and request.policy not in state.policies:
        return reject(
            "unregistered_policy", "policy", f"no policy {request.policy!r} was published"
        )
    return None


def id_in_use(event_id: str, request: RequestFact, refused: bool) -> Reject:
    """The id belongs to another request."""
    message = (
        f"{request.session_id} was used by a request that was rejected: ask again under a new id"
        if refused
        else f"{request.session_id} was requested before with other facts: take a new id"
    )
    return Reject(event_id, "id_in_use", "session_id", message, str(request.session_id))


def answer(state: SchedulerState, command: Ask, now: datetime) -> list[Intent]:
    """What follows from a request: a refusal, the end of one that comes too late, or nothing."""
    request, prior = command.request, command.prior
    session_id = request.session_id
    if command.event_id in state.rejected_events:
        return []
    facts = facts_digest(request)
    if session_id in state.refused or (prior is not None and prior.facts and prior.refused):
        known = state.refused.get(session_id) or (prior.facts if prior else None)
        return [id_in_use(command.event_id, request, refused=known == facts)]
    known = _known_facts(state, session_id, prior)
    if known is not None:
        return [] if known in (facts, b"") else [id_in_use(command.event_id, request, False)]
    if prior is not None and prior.refused:
        return []  # this very request was answered before
    rejection = check_request(state, command.event_id, request, now)
    if rejection is not None:
        return [rejection]
    if request.deadline is not None and request.deadline <= now:
        cause = keys.of(session_id, keys.REQUESTED)
        return [End(session_id, "cancelled", "deadline", "", 0, cause, None)]
    return []


def _known_facts(state: SchedulerState, session_id: UUID, prior: Prior | None) -> bytes | None:
    """Digest of the request that has the id; b"" where there is one but its facts are not known."""
    session = state.sessions.get(session_id)
    if session is not None:
        return session.facts
    logged = prior.facts if prior is not None else None
    if session_id in state.closed:
        return state.closed[session_id] or logged or b""
    return logged
