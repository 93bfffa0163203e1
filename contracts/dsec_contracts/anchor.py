"""Events of anchors: the state of a session was captured, and what became of the blob.

An anchor is taken right behind an environment step, before that step's reward is heard. Its fact
says what was captured and comes out again when the session is re-executed; the blob's own bytes do
not (two pickles of equal state may differ), so where they lie is circumstance.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.keys import Ordinal, SessionId, check_ordinal
from dsec_contracts.session import Hash

ANCHOR_BLOB_BYTES_MAX = 64 << 20
"""What one anchor may take, compressed; unpacked it may take `ANCHOR_STATE_BYTES_MAX`."""
ANCHOR_STATE_BYTES_MAX = 512 << 20
ANCHOR_TAGS_MAX = 16

AnchorId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Derived from the session's seed, the position and the content."""
Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Position = Annotated[int, Field(ge=1), AfterValidator(check_ordinal)]
"""How many environment steps the session had taken: the anchor stands behind step `position - 1`.
"""


class AnchorCapturedFact(Part):
    """What was captured, and where in the session."""

    session_id: SessionId
    position: Position
    anchor_id: AnchorId
    content: bytes
    """SHA-256 of the chain at the position and, with `covers_agent`, of the agent's state."""
    covers_agent: bool
    """Whether the agent's state has canonical bytes, and `content` covers them."""
    tags: Annotated[list[Tag], Field(max_length=ANCHOR_TAGS_MAX)] = Field(default_factory=list)
    """Why it was taken (`every_steps`, `episode_start`, `agent`), and the agent's own."""
    parents: list[AnchorId] = Field(default_factory=list)
    """The session's anchor before this one; none for the first."""
    fold_version: int = 1
    """The version of what the blob holds. A reader restores only those that it knows."""


class AnchorCapturedCircumstance(Part):
    """Who captured it, and the blob."""

    worker: str = ""
    lane: str = ""
    attempt: Ordinal = 0
    blob: Hash | None = None
    """SHA-256 of the stored bytes, which is the blob's name. None: see `error`."""
    size_bytes: int = 0
    data: bytes = b""
    """The blob's bytes. Empty where they are too many for a message and lie in the object store
    already. They travel here and are not logged."""
    error: Prose = ""
    """Why nothing could be captured."""


class AnchorCaptured(Event):
    """A session's state was captured."""

    fact: AnchorCapturedFact
    circumstance: AnchorCapturedCircumstance = AnchorCapturedCircumstance()


class AnchorOutcomeCircumstance(Part):
    """Who dealt with it, and how long that took."""

    replica: str = ""
    seconds: float | None = None
    message: Prose = ""


class AnchorStoredFact(Part):
    """The anchor, and its blob."""

    session_id: SessionId
    position: Position
    anchor_id: AnchorId
    blob: Hash
    """SHA-256 of the stored bytes, which is the blob's name."""
    size_bytes: int


class AnchorStored(Event):
    """An anchor's blob lies in the object store: it was written once, and read back."""

    fact: AnchorStoredFact
    circumstance: AnchorOutcomeCircumstance = AnchorOutcomeCircumstance()


class AnchorLostFact(Part):
    """The anchor, and why its blob will not be had."""

    session_id: SessionId
    position: Position
    anchor_id: AnchorId
    code: Literal["not_captured", "blob_missing", "blob_damaged"]
    """`not_captured`: the state cannot be pickled; `blob_missing`: it was not put where the event
    says; `blob_damaged`: its bytes do not match its name."""


class AnchorLost(Event):
    """An anchor has no blob, and will have none: no session can restart from it."""

    fact: AnchorLostFact
    circumstance: AnchorOutcomeCircumstance = AnchorOutcomeCircumstance()
