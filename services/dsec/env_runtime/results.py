"""Results of tools that lie in the object store, on their way to their sessions.

A session hears its answers in the order of the stream, since of two answers to one call the first
counts: so what follows a result that is being fetched waits behind it. Other sessions do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    before_sleep_log,
    retry_if_exception_type,
    wait_random_exponential,
)

from dsec.platform.cancellation import cancelled
from dsec.platform.objects import BlobNotFound, ObjectStore, ObjectStoreError
from dsec.platform.specs import BlobMissing, blob_content
from dsec.session.io import Input
from dsec.session.stored_results import StoredResult

log = logging.getLogger(__name__)

FETCHES_IN_FLIGHT_MAX = 8
FETCH_PAUSE_S_MIN = 0.1
FETCH_PAUSE_S_MAX = 5.0
AWAY_S_MAX = 300.0
"""A store that is away for so long is given up; the lane asks for the answer again."""
ABSENT_S_MAX = 10.0
"""A store that is there and has not had a blob for so long has lost it."""

Given = Input | StoredResult


class Results:
    """Fetches stored results of a lane's sessions; `run` runs until it is cancelled."""

    def __init__(
        self,
        objects: ObjectStore | None,
        give: Callable[[bytes, Input], None],
        lost: Callable[[bytes, str], None],
    ) -> None:
        """Prepare.

        Args:
            give: takes what a session is given, by the bytes of its id, when it is complete.
            lost: is told of a session whose result is nowhere, and why.
        """
        self._objects = objects
        self._give = give
        self._lost = lost
        self._held: dict[bytes, list[Given]] = {}
        self._begun: asyncio.Queue[bytes] = asyncio.Queue()
        self._places = asyncio.Semaphore(FETCHES_IN_FLIGHT_MAX)

    def holds(self, raw_id: bytes, given: Given) -> Input | None:
        """What can be given now: `given`, or nothing where it has to wait."""
        if (waiting := self._held.get(raw_id)) is not None:
            waiting.append(given)
            return None
        if isinstance(given, Input):
            return given
        self._held[raw_id] = [given]
        self._begun.put_nowait(raw_id)
        return None

    async def run(self) -> None:
        """Fetch what is held."""
        async with asyncio.TaskGroup() as group:
            while not cancelled():
                raw_id = await self._begun.get()
                group.create_task(self._release(raw_id))

    async def _release(self, raw_id: bytes) -> None:
        held = self._held[raw_id]
        try:
            while held:
                given = held.pop(0)
                if isinstance(given, StoredResult):
                    given = given.given(await self._content(given.blob))
                self._give(raw_id, given)
        except BlobMissing as missing:
            self._lost(raw_id, str(missing))
        except (ObjectStoreError, ValueError) as error:
            # What is not heard is asked for again.
            log.error("a result is not delivered: %s", error)
        finally:
            del self._held[raw_id]

    async def _content(self, blob: str) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((ObjectStoreError, BlobMissing)),
            wait=wait_random_exponential(multiplier=FETCH_PAUSE_S_MIN, max=FETCH_PAUSE_S_MAX),
            stop=_is_over,
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        async with self._places:
            content: bytes = await retrying(
                asyncio.to_thread, blob_content, self._objects, blob, "the result of a tool"
            )
        return content


def _is_over(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome is not None else None
    absent = isinstance(error, (BlobMissing, BlobNotFound))
    return (state.seconds_since_start or 0.0) >= (ABSENT_S_MAX if absent else AWAY_S_MAX)
