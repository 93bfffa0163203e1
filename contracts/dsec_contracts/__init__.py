"""The events of DSec: what services and upstream systems agree on. Needs pydantic only."""

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
from dsec_contracts.service import ServiceDeclared
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
