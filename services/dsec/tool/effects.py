"""What the handlers need of the world: tools, their secrets, and what the log has of calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dsec.platform.log import LogReader
from dsec.platform.secrets import SecretAbsent, secrets_of
from dsec.platform.specs import Gone, KeptSpecs, Patience, SpecSource
from dsec.session.documents import SpecError, ToolDocument, unseal
from dsec.session.log_row import LogRow
from dsec.tool.frames import Failure
from dsec.tool.processes import Program
from dsec_contracts import keys


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the service knows it: never its code."""

    document: ToolDocument
    program: Program


class Tools:
    """Tools by the hashes of their specs."""

    def __init__(
        self,
        source: SpecSource,
        environment: Mapping[str, str],
        *,
        patience: Patience,
        kept_max: int,
    ) -> None:
        self._environment = environment
        self._specs = KeptSpecs(source, self._read, patience=patience, kept_max=kept_max)

    async def get(self, spec_hash: str, position: int) -> Tool | Failure:
        """A tool; a failure is that of every call of it.

        Raises:
            Absent: it is not there, but has not been looked for long enough.
            LogBehind, LogUnavailable, ObjectStoreError: nobody can say whether it is there.
        """
        try:
            return await self._specs.get(spec_hash, position)
        except Gone as gone:
            return Failure("spec_not_found", str(gone))

    def _read(self, spec_hash: str, content: bytes) -> Tool | Failure:
        return _tool(spec_hash, content, self._environment)


def _tool(spec_hash: str, content: bytes, environment: Mapping[str, str]) -> Tool | Failure:
    try:
        document, _ = unseal(content, "tool")
    except SpecError as error:
        return Failure("tool_load_failed", str(error))
    assert isinstance(document, ToolDocument)
    try:
        secrets = secrets_of(environment, document.secret_names, "the tool service")
    except SecretAbsent as absent:
        return Failure("secret_absent", str(absent))
    return Tool(document, Program(spec_hash, content, secrets))


@dataclass(frozen=True, slots=True)
class Past:
    """What the log has of a call."""

    answer: LogRow | None
    begun_at: datetime | None
    begun_id: str = ""
    """The event by which it was begun."""


Memory = Callable[[UUID, int, int, int], Awaitable[Past]]
"""From session, step, turn and index to what is known of a call."""


def memory_of(
    log: LogReader, last_said: Callable[[], Awaitable[int]], behind_wait_s: float
) -> Memory:
    """What the log has of calls, once it has all that is published of calls by now.

    Whoever may have made a call before published its answer before it could acknowledge the call,
    and so before anybody else got it: a log that has come to the last of these has whatever there
    is. Not to the end of the stream: that may be a message which the recorder never reads.

    Args:
        last_said: the position of the last message about any call; 0: the stream has none.
    """

    async def past(session_id: UUID, step: int, turn: int, index: int) -> Past:
        await log.wait_floor(await last_said(), behind_wait_s)
        answer = await log.row(session_id, keys.tool_result(step, turn, index))
        begun = await log.row(session_id, keys.tool_begun(step, turn, index))
        if begun is None:
            return Past(answer, None)
        return Past(answer, begun.event_time, begun.event_id)

    return past
