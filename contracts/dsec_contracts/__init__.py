"""The events of DSec: what services and upstream systems agree on. Needs pydantic only.

Everything is loaded when it is first asked for: most processes need the canonical encoding, or a
few of the events, and pydantic's models are most of what a small one would have to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what follows, said to whoever reads types; a test compares the two
    from dsec_contracts.anchor import AnchorCaptured as AnchorCaptured
    from dsec_contracts.anchor import AnchorLost as AnchorLost
    from dsec_contracts.anchor import AnchorStored as AnchorStored
    from dsec_contracts.canonical import CanonicalError as CanonicalError
    from dsec_contracts.canonical import decode as decode
    from dsec_contracts.canonical import encode as encode
    from dsec_contracts.catalog import BY_TYPE as BY_TYPE
    from dsec_contracts.catalog import EVENTS as EVENTS
    from dsec_contracts.catalog import UnknownEvent as UnknownEvent
    from dsec_contracts.catalog import parse as parse
    from dsec_contracts.curriculum import CurriculumChanged as CurriculumChanged
    from dsec_contracts.envelope import Envelope as Envelope
    from dsec_contracts.envelope import EnvelopeError as EnvelopeError
    from dsec_contracts.envelope import Event as Event
    from dsec_contracts.evaluation import PolicySanityChecked as PolicySanityChecked
    from dsec_contracts.keys import SYSTEM_SESSION as SYSTEM_SESSION
    from dsec_contracts.keys import session_time as session_time
    from dsec_contracts.reward import RewardDeferred as RewardDeferred
    from dsec_contracts.reward import RewardMissing as RewardMissing
    from dsec_contracts.reward import RewardRescored as RewardRescored
    from dsec_contracts.reward import RewardRescoreRequested as RewardRescoreRequested
    from dsec_contracts.reward import RewardScored as RewardScored
    from dsec_contracts.service import ServiceDeclared as ServiceDeclared
    from dsec_contracts.service import ServiceModeChanged as ServiceModeChanged
    from dsec_contracts.session import SessionCancelRequested as SessionCancelRequested
    from dsec_contracts.session import SessionEnded as SessionEnded
    from dsec_contracts.session import SessionPlaced as SessionPlaced
    from dsec_contracts.session import SessionRejected as SessionRejected
    from dsec_contracts.session import SessionReleased as SessionReleased
    from dsec_contracts.session import SessionRequested as SessionRequested
    from dsec_contracts.session import SessionResumed as SessionResumed
    from dsec_contracts.session import SessionStarted as SessionStarted
    from dsec_contracts.spec import PolicyPublished as PolicyPublished
    from dsec_contracts.spec import SpecRegistered as SpecRegistered
    from dsec_contracts.step import SessionStepped as SessionStepped
    from dsec_contracts.tool import ToolBegun as ToolBegun
    from dsec_contracts.tool import ToolCalled as ToolCalled
    from dsec_contracts.tool import ToolFailed as ToolFailed
    from dsec_contracts.tool import ToolRetried as ToolRetried
    from dsec_contracts.tool import ToolReturned as ToolReturned
    from dsec_contracts.worker import WorkerFenced as WorkerFenced
    from dsec_contracts.worker import WorkerHeartbeat as WorkerHeartbeat

_NAMES = {
    "anchor": ("AnchorCaptured", "AnchorLost", "AnchorStored"),
    "canonical": ("CanonicalError", "decode", "encode"),
    "catalog": ("BY_TYPE", "EVENTS", "UnknownEvent", "parse"),
    "curriculum": ("CurriculumChanged",),
    "envelope": ("Envelope", "EnvelopeError", "Event"),
    "evaluation": ("PolicySanityChecked",),
    "keys": ("SYSTEM_SESSION", "session_time"),
    "reward": (
        "RewardDeferred",
        "RewardMissing",
        "RewardRescoreRequested",
        "RewardRescored",
        "RewardScored",
    ),
    "service": ("ServiceDeclared", "ServiceModeChanged"),
    "session": (
        "SessionCancelRequested",
        "SessionEnded",
        "SessionPlaced",
        "SessionRejected",
        "SessionReleased",
        "SessionRequested",
        "SessionResumed",
        "SessionStarted",
    ),
    "spec": ("PolicyPublished", "SpecRegistered"),
    "step": ("SessionStepped",),
    "tool": ("ToolBegun", "ToolCalled", "ToolFailed", "ToolRetried", "ToolReturned"),
    "worker": ("WorkerFenced", "WorkerHeartbeat"),
}
"""Module to what of it has a name here."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'dsec_contracts' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dsec_contracts.{place}"), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
