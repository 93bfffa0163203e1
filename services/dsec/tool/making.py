"""Making a call: its attempts, each in a calling process, and the note that it is begun."""

from __future__ import annotations

import asyncio
from collections import Counter

from dsec.platform.bus import Later
from dsec.platform.telemetry import metrics
from dsec.platform.telemetry.metrics import Metric
from dsec.tool import attempts
from dsec.tool.asked import Asked
from dsec.tool.effects import Memory, Tool
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes
from dsec.tool.quotas import Quotas
from dsec.tool.settings import ToolSettings
from dsec.tool.telling import Teller

STOP_S_MAX = 1.0
"""For so long a call of an MCP server that is given up may cancel what the server does for it."""


class Maker:
    """Makes the calls of one replica."""

    def __init__(
        self,
        processes: Processes,
        quotas: Quotas,
        teller: Teller,
        past: Memory,
        settings: ToolSettings,
        counts: Counter[Metric],
    ) -> None:
        self._processes = processes
        self._quotas = quotas
        self._teller = teller
        self._past = past
        self._retry_s = settings.tool_retry_s_min
        self._sure_s = settings.tool_ack_wait_s / 2
        """For so long a turn is this replica's alone: half before it is looked at, half after."""
        self._counts = counts
        self.begun: set[str] = set()
        """The keys of the calls that a tool was given."""

    async def made(
        self, asked: Asked, tool: Tool, deadline_s: float, looked_s: float
    ) -> tuple[Outcome, int]:
        """What came of a call, and how often it was made for that.

        Args:
            looked_s: when its past was looked at, on the loop's clock.

        Raises:
            Later: somebody else has begun it.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s

        async def attempt() -> Outcome:
            await self._quotas.moment(tool.program.spec_hash, tool.document.quota, until_s)
            left_s = max(0.0, until_s - loop.time())
            return await self._attempted(asked, tool, left_s, looked_s)

        async def on_retry(number: int, failure: Failure, pause_s: float) -> None:
            self._counts[metrics.TOOL_RETRIES] += 1
            await self._teller.retried(asked, number, failure, pause_s)

        return await attempts.made(attempt, tool.document.attempts_max, deadline_s, on_retry)

    async def _attempted(
        self, asked: Asked, tool: Tool, deadline_s: float, looked_s: float
    ) -> Outcome:
        # Before it is begun: should no process start, nothing has happened.
        process = await self._processes.take(tool.program)
        try:
            if not tool.document.idempotent:
                await self._begin(asked, looked_s)
        except BaseException:
            await self._processes.give_back(process)
            raise
        order = Order(asked.arguments, asked.key)
        self.begun.add(asked.key)
        stop_s = STOP_S_MAX if tool.document.kind == "mcp" else 0.0
        outcome = await self._processes.call(process, order, deadline_s, stop_s)
        if isinstance(outcome, Failure) and outcome.code in ("deadline", "tool_crashed"):
            # In whose midst the tool was: another call is safe only if the tool says so.
            return Failure(outcome.code, outcome.message, tool.document.idempotent)
        return outcome

    async def _begin(self, asked: Asked, looked_s: float) -> None:
        """Note that a call is about to be made, and be sure that nobody else did.

        The stream refuses a second note, but for one whose first was trimmed; that one is in the
        log. It can be there only if the turn was another's meanwhile: if this process was held up.

        Raises:
            Later: somebody did.
        """
        await self._teller.begin(asked)
        if asyncio.get_running_loop().time() - looked_s <= self._sure_s:
            return
        past = await self._past(asked.session_id, asked.step, asked.turn, asked.index)
        if past.begun_id != self._teller.begun_id(asked):
            raise Later(self._retry_s, f"{asked.key} was begun by another")
