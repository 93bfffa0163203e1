"""Declarations of outside services, from the log: the newest of each name holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from dsec.platform.log import LogBehind, LogReader, LogUnavailable
from dsec.platform.specs import Absent, Patience
from dsec.session.log_row import LogRow, fact_map
from dsec_contracts.service import ServiceFact

log = logging.getLogger(__name__)

KEPT_S = 2.0
"""A declaration that was changed holds after this long."""

DeclarationSource = Callable[[int], Awaitable[Mapping[str, ServiceFact]]]
"""All declarations, as of a position of the stream at the earliest."""


class NotDeclared(Absent):
    """The log has got to a step, and does not have a service that the step's reward asks."""

    code = "service_not_declared"


class Declarations:
    """Services by name."""

    def __init__(
        self, source: DeclarationSource, patience: Patience, clock: Callable[[], float]
    ) -> None:
        self._source = source
        self._patience = patience
        self._clock = clock
        self._known: Mapping[str, ServiceFact] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    def known(self, name: str) -> ServiceFact | None:
        """The declaration that holds, if that was looked up just now."""
        return self._known[name] if self._is_fresh(name) else None

    async def get(self, name: str, position: int) -> ServiceFact:
        """The declaration that holds.

        Args:
            position: of a step whose reward asks the service.

        Raises:
            Absent: there is none, but it has not been looked for long enough.
            Gone: there is none.
            LogBehind, LogUnavailable: nobody can say, and none was known before.
        """
        if self._is_fresh(name):
            return self._known[name]
        async with self._reading:  # one asks for all
            if not self._is_fresh(name):
                await self._read(name, position)
        return self._known[name]

    def _is_fresh(self, name: str) -> bool:
        return name in self._known and self._clock() - self._read_at < KEPT_S

    async def _read(self, name: str, position: int) -> None:
        if name in self._known:
            # It was declared before: a log that is away takes nothing back.
            try:
                self._known = {**self._known, **await self._source(0)}
            except (LogBehind, LogUnavailable) as error:
                log.warning("services are asked as they were declared before: %s", error)
            self._read_at = self._clock()
            return
        with self._patience.looking_for(f"service {name}"):
            self._known = await self._source(position)
            self._read_at = self._clock()
            if name not in self._known:
                raise NotDeclared(
                    f"service {name!r} is not declared: write it into services.yaml, and "
                    "`dsec services declare services.yaml`"
                )


def declaration_source(log: LogReader, behind_wait_s: float) -> DeclarationSource:
    """Declarations from the log."""

    async def declared(position: int) -> Mapping[str, ServiceFact]:
        await log.wait_floor(position, behind_wait_s)
        return newest(await log.service_declarations())

    return declared


def newest(rows: list[LogRow]) -> dict[str, ServiceFact]:
    """The declarations that hold, from rows in the order of the log."""
    facts = (ServiceFact.model_validate(fact_map(row)) for row in rows)
    return {fact.name: fact for fact in facts}
