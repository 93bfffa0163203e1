"""What the handlers need of the world: specs from the log, and large observations.

What stays absent is a fact: after `reward_absent_s_max` of it the step's session is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsec.platform.objects import ObjectStore, put_patiently
from dsec.platform.specs import Gone, KeptSpecs, Patience, SpecSource, blob_content
from dsec.reward.asking import Answered
from dsec.reward.fact import ENV
from dsec.reward.frames import Failure
from dsec.reward.score import RewardError, reward_document
from dsec.session.observations import reference, resolve

RESPONSES_INLINE_BYTES_MAX = 16 * 1024
"""What services answered for one step, beside its reward; more goes to the object store."""
RESPONSES_WITHOUT_STORE_BYTES_MAX = 256 * 1024


class Lost(bytes):
    """In place of an observation whose blob is gone: why. The row that needs it has no reward."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A reward spec as the service knows it: never its code, only whether there is any."""

    content: bytes
    is_env: bool
    error: RewardError | None = None
    per_episode: bool = False
    """It scores whole episodes."""
    services: frozenset[str] = frozenset()
    """The outside services that it may ask. What its function's process says is not asked."""


class Specs:
    """Specs by hash."""

    def __init__(self, source: SpecSource, *, patience: Patience, kept_max: int) -> None:
        self._specs = KeptSpecs(source, _spec, patience=patience, kept_max=kept_max)

    async def get(self, spec_hash: str, position: int) -> Spec:
        """A spec; one that is absent for good has an error.

        Args:
            position: of a step that names it.

        Raises:
            Absent: it is not there, but has not been looked for long enough.
            LogBehind, LogUnavailable, ObjectStoreError: nobody can say whether it is there.
        """
        try:
            return await self._specs.get(spec_hash, position)
        except Gone as gone:
            return Spec(b"", is_env=False, error=RewardError(gone.code, str(gone)))


def _spec(spec_hash: str, content: bytes) -> Spec:
    try:
        document, _ = reward_document(content)
    except RewardError as error:
        return Spec(content, is_env=False, error=error)
    return Spec(
        content,
        document.entry == ENV,
        per_episode=document.per == "episode",
        services=frozenset(document.services),
    )


class Keep:
    """Where what services answered is kept: beside the reward, or in the object store."""

    def __init__(self, objects: ObjectStore | None) -> None:
        self._objects = objects

    async def kept(self, found: Answered) -> Answered:
        """An outcome with what is recorded of the answers: themselves, or a reference."""
        size = len(found.responses)
        if size <= RESPONSES_INLINE_BYTES_MAX:
            return found
        if self._objects is not None:
            key = await put_patiently(self._objects, found.responses)
            return Answered(found.outcome, reference(key, size))
        if size <= RESPONSES_WITHOUT_STORE_BYTES_MAX:
            return found
        if isinstance(found.outcome, Failure):
            return Answered(found.outcome, b"")  # what it says of itself has to do
        told = (
            f"services answered {size} bytes for one step; without an object store "
            f"{RESPONSES_WITHOUT_STORE_BYTES_MAX} can be kept: set DSEC_OBJECT_STORE_URL"
        )
        return Answered(Failure("responses_too_large", told), b"")


def blob_source(objects: ObjectStore | None, patience: Patience) -> Callable[[str], bytes]:
    """Where observations that are only referred to come from."""

    def get(key: str) -> bytes:
        with patience.looking_for(key):
            return blob_content(objects, key, "an observation")

    return get


def resolved(recorded: bytes, get: Callable[[str], bytes]) -> bytes:
    """The canonical observation behind a recorded one; `Lost` where its blob is gone."""
    if recorded[:1] != b"\xa2":
        return recorded
    try:
        return resolve(recorded, get)
    except Gone as gone:
        return Lost(str(gone).encode())
