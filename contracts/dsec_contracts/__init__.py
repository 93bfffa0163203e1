"""The events of DSec: what services and upstream systems agree on. Needs pydantic only.

Everything is loaded when it is first asked for: most processes need the canonical encoding, or a
few of the events, and pydantic's models are most of what a small one would have to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsec_contracts.anchor import AnchorCaptured, AnchorLost, AnchorStored
    from dsec_contracts.canonical import CanonicalError, decode, encode
    from dsec_contracts.catalog import BY_TYPE, EVENTS, UnknownEvent, parse
    from dsec_contracts.curriculum import CurriculumChanged
    from dsec_contracts.envelope import Envelope, EnvelopeError, Event
    from dsec_contracts.evaluation import PolicySanityChecked
    from dsec_contracts.keys import SYSTEM_SESSION, session_time
    from dsec_contracts.reward import (
        RewardDeferred,
        RewardMissing,
        RewardRescored,
        RewardRescoreRequested,
        RewardScored,
    )
    from dsec_contracts.service import ServiceDeclared, ServiceModeChanged
    from dsec_contracts.session import (
        SessionCancelRequested,
        SessionEnded,
        SessionPlaced,
        SessionRejected,
        SessionReleased,
        SessionRequested,
        SessionResumed,
        SessionStarted,
    )
    from dsec_contracts.spec import PolicyPublished, SpecRegistered
    from dsec_contracts.step import SessionStepped
    from dsec_contracts.tool import ToolBegun, ToolCalled, ToolFailed, ToolRetried, ToolReturned
    from dsec_contracts.worker import WorkerFenced, WorkerHeartbeat

__all__ = [
    "BY_TYPE",
    "EVENTS",
    "SYSTEM_SESSION",
    "AnchorCaptured",
    "AnchorLost",
    "AnchorStored",
    "CanonicalError",
    "CurriculumChanged",
    "Envelope",
    "EnvelopeError",
    "Event",
    "PolicyPublished",
    "PolicySanityChecked",
    "RewardDeferred",
    "RewardMissing",
    "RewardRescoreRequested",
    "RewardRescored",
    "RewardScored",
    "ServiceDeclared",
    "ServiceModeChanged",
    "SessionCancelRequested",
    "SessionEnded",
    "SessionPlaced",
    "SessionRejected",
    "SessionReleased",
    "SessionRequested",
    "SessionResumed",
    "SessionStarted",
    "SessionStepped",
    "SpecRegistered",
    "ToolBegun",
    "ToolCalled",
    "ToolFailed",
    "ToolRetried",
    "ToolReturned",
    "UnknownEvent",
    "WorkerFenced",
    "WorkerHeartbeat",
    "decode",
    "encode",
    "parse",
    "session_time",
]

_PLACES = {
    "AnchorCaptured": "anchor",
    "AnchorLost": "anchor",
    "AnchorStored": "anchor",
    "CanonicalError": "canonical",
    "decode": "canonical",
    "encode": "canonical",
    "BY_TYPE": "catalog",
    "EVENTS": "catalog",
    "UnknownEvent": "catalog",
    "parse": "catalog",
    "CurriculumChanged": "curriculum",
    "Envelope": "envelope",
    "EnvelopeError": "envelope",
    "Event": "envelope",
    "PolicySanityChecked": "evaluation",
    "SYSTEM_SESSION": "keys",
    "session_time": "keys",
    "RewardDeferred": "reward",
    "RewardMissing": "reward",
    "RewardRescored": "reward",
    "RewardRescoreRequested": "reward",
    "RewardScored": "reward",
    "ServiceDeclared": "service",
    "ServiceModeChanged": "service",
    "SessionCancelRequested": "session",
    "SessionEnded": "session",
    "SessionPlaced": "session",
    "SessionRejected": "session",
    "SessionReleased": "session",
    "SessionRequested": "session",
    "SessionResumed": "session",
    "SessionStarted": "session",
    "PolicyPublished": "spec",
    "SpecRegistered": "spec",
    "SessionStepped": "step",
    "ToolBegun": "tool",
    "ToolCalled": "tool",
    "ToolFailed": "tool",
    "ToolRetried": "tool",
    "ToolReturned": "tool",
    "WorkerFenced": "worker",
    "WorkerHeartbeat": "worker",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'dsec_contracts' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dsec_contracts.{place}"), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
