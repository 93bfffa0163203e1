"""Tools of MCP servers that answer with a task: it is asked for until it is over.

The extension `io.modelcontextprotocol/tasks` of MCP 2026-07-28: a server may answer a call with the
name of a task, which goes on when the connection does not. The client library carries the answer
here; what the tool returned is then what the task ends with. A call that nobody waits for any more,
because its deadline is over or its session is, cancels its task, or that would go on for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import anyio
import mcp
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.session import ClientSession
from mcp.types import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    CallToolResult,
    EmptyResult,
    Request,
    RequestParams,
    Result,
)

from dsec.tool.http_exchange import fail
from dsec.tool.mcp_http import Heard

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two questions, where the server does not say."""
POLL_S_MIN = 0.05
POLL_S_MAX = 60.0
"""What a server may say is between these."""
POLL_WAIT_S_MAX = 30.0
"""For the answer to one question."""
POLL_FAILURES_MAX = 5
"""So many questions in a row may get no answer over HTTP: a task outlives a connection."""
CANCEL_WAIT_S_MAX = 0.8
"""How long a server is waited for that is told to cancel."""
_FINAL = (INVALID_PARAMS, METHOD_NOT_FOUND)
"""A server's errors that say that it knows no such task."""


@contextlib.contextmanager
def when_over(pipe: int | None, then: Callable[[], object]) -> Iterator[None]:
    """Within this `then` is called once a pipe ends in which nothing is to come."""
    if pipe is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def over() -> None:
        loop.remove_reader(pipe)
        then()

    loop.add_reader(pipe, over)
    try:
        yield
    finally:
        loop.remove_reader(pipe)


class TaskTold(Result):
    """A task, as its server tells of it."""

    task_id: str
    status: str
    status_message: str | None = None
    poll_interval_ms: float | None = None
    result: dict[str, Any] | None = None
    error: Any = None


class TaskMade(TaskTold):
    """The answer to a call."""

    result_type: Literal["task"]


class _Which(RequestParams):
    task_id: str


class _Get(Request[_Which, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class _Cancel(Request[_Which, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


class Tasks(ClientExtension):
    """Waits for tasks."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, heard: Heard, *, over_http: bool) -> None:
        self._heard = heard
        self._over_http = over_http

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """An answer may be a task."""
        return (ResultClaim(result_type="task", model=TaskMade, resolve=self._resolve),)

    async def _resolve(self, made: TaskMade, context: ClaimContext) -> CallToolResult:
        """What a task ends with.

        Raises:
            Refused: it has no result.
            mcp.MCPError: the server does not know it, or answers no more.
        """
        try:
            told = await self._over(made, context.session)
        except BaseException:  # given up, or of no more use
            await _cancel(context.session, made.task_id)
            raise
        return _result(told)

    async def _over(self, told: TaskTold, session: ClientSession) -> TaskTold:
        """A task that goes on no more. The bound is the call's deadline, which ends the process."""
        unheard, which = 0, _Which(task_id=told.task_id)
        while isinstance(told, TaskMade) or told.status == "working":
            await anyio.sleep(self._pause_s(told))
            try:
                told = await session.send_request(_Get(params=which), TaskTold, POLL_WAIT_S_MAX)
                unheard = 0
            except mcp.MCPError as error:
                unheard += 1
                is_final = error.code in _FINAL or not self._over_http
                if is_final or unheard > POLL_FAILURES_MAX:
                    raise
                log.info("an MCP server does not tell of its task: %s", error)
        if told.status == "input_required":
            fail("tool_raised", "the task asks for input, and a tool has nobody to ask for it")
        return told

    def _pause_s(self, told: TaskTold) -> float:
        refusal, wanted_s = self._heard.refusal, POLL_S
        self._heard.forget()
        if told.poll_interval_ms is not None:
            wanted_s = told.poll_interval_ms / 1000
        if refusal is not None and refusal.retry_after_s is not None:
            wanted_s = max(wanted_s, refusal.retry_after_s)
        return min(max(POLL_S_MIN, wanted_s), POLL_S_MAX)


def _result(told: TaskTold) -> CallToolResult:
    why = f": {told.status_message}" if told.status_message else ""
    if told.status == "failed":
        error = told.error if isinstance(told.error, dict) else {}
        fail("tool_raised", f"the task failed{why}: {error.get('message', told.error)}")
    if told.status == "cancelled":
        fail("task_cancelled", f"the server cancelled the task{why}")
    if told.status != "completed":
        fail("mcp_broken", f"the task has a status that there is not: {told.status!r}{why}")
    # One that is none is a `ValueError`, as with a call that is answered at once.
    return CallToolResult.model_validate(told.result, by_name=False)


async def _cancel(session: ClientSession, task_id: str) -> None:
    """Tell a server that nobody waits for its task any more. It may do so or not."""
    request = _Cancel(params=_Which(task_id=task_id))
    with anyio.move_on_after(CANCEL_WAIT_S_MAX, shield=True), contextlib.suppress(mcp.MCPError):
        await session.send_request(request, EmptyResult, CANCEL_WAIT_S_MAX)
