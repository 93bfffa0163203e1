"""Finding the anchor that a session can come back from.

The log names the anchors that are stored, each with the hash of its bytes. The newest whose bytes
can be had, and match, is used; a blob that is missing, damaged or away is passed over for the one
before it, and after a few for step 0: a restart must not depend on a blob.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.platform.objects import BlobDamaged, BlobNotFound, ObjectStore, ObjectStoreError
from dsec.session.anchor_record import RecordedAnchor
from dsec.session.io import Ended
from dsec.session.recorded import Recorded
from dsec_contracts.session import AnchorMiss, ResumedCircumstance

log = logging.getLogger(__name__)

ANCHORS_TRIED_MAX = 3
STORE_WAIT_S = 5.0
"""How long one load waits for a store that is away: re-execution costs time, not correctness."""
STORE_PAUSE_S_MAX = 1.0


class Loaded(NamedTuple):
    """An anchor and its bytes, which are those that the log names."""

    anchor: RecordedAnchor
    blob: bytes


@dataclass(slots=True)
class Search:
    """The anchors of one session that were tried, the newest first."""

    recorded: Recorded
    objects: ObjectStore | None
    misses: list[AnchorMiss] = field(default_factory=list)
    position_min: int = 0
    """Anchors before it are of no use: what came behind them cannot be executed again."""

    async def next(self) -> Loaded | None:
        """The newest anchor that was not tried and can be had. None: begin at step 0."""
        tried = {miss.position for miss in self.misses}
        for position in sorted(self.recorded.anchors, reverse=True):
            anchor = self.recorded.anchors[position]
            in_reach = self.position_min <= position <= len(self.recorded.steps)
            usable = anchor.blob is not None and in_reach
            if not usable or position in tried or self.objects is None:
                continue
            if len(self.misses) >= ANCHORS_TRIED_MAX:
                break
            if (loaded := await self._load(self.objects, anchor)) is not None:
                return loaded
        return None

    def miss(self, anchor: RecordedAnchor, code: str, message: str) -> None:
        """An anchor cannot be used."""
        log.warning(
            "anchor %s at step %d: %s: %s", anchor.anchor_id, anchor.position, code, message
        )
        told = AnchorMiss(
            anchor_id=anchor.anchor_id, position=anchor.position, code=code, message=message
        )
        self.misses.append(told)

    def explained(self, ended: Ended) -> Ended:
        """An end for want of an anchor, with what was wrong with each that was tried."""
        tried = [f"anchor {m.position}: {m.code}: {m.message}" for m in self.misses]
        return replace(ended, message="; ".join([ended.message, *tried]))

    def resumed(self, worker: str, loaded: Loaded | None) -> ResumedCircumstance | None:
        """What to say of it; nothing of a session without anchors."""
        if not self.recorded.anchors:
            return None
        return ResumedCircumstance(
            worker=worker,
            anchor_id=None if loaded is None else loaded.anchor.anchor_id,
            from_step=0 if loaded is None else loaded.anchor.position,
            steps_recorded=len(self.recorded.steps),
            misses=self.misses,
        )

    async def _load(self, objects: ObjectStore, anchor: RecordedAnchor) -> Loaded | None:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_away),
            wait=wait_random_exponential(multiplier=0.1, max=STORE_PAUSE_S_MAX),
            stop=stop_after_delay(STORE_WAIT_S),
            reraise=True,
        )
        try:
            blob: bytes = await retrying(asyncio.to_thread, objects.get, anchor.blob)
        except BlobNotFound as error:
            self.miss(anchor, "blob_missing", str(error))
        except BlobDamaged as error:
            self.miss(anchor, "blob_damaged", str(error))
        except ObjectStoreError as error:
            self.miss(anchor, "store_away", str(error))
        else:
            return Loaded(anchor, blob)
        return None


def _is_away(error: BaseException) -> bool:
    return isinstance(error, ObjectStoreError) and not isinstance(
        error, (BlobNotFound, BlobDamaged)
    )
