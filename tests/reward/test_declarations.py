"""What is declared: the newest holds, one asks for all, and a log that is away loses none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from dsec.platform.log import LogUnavailable
from dsec.platform.specs import Gone, Patience
from dsec.reward.declarations import KEPT_S, Declarations, NotDeclared
from dsec_contracts.service import ServiceFact


class Log:
    """A log of declarations, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away = False
        self.positions: list[int] = []
        self.facts: dict[str, ServiceFact] = {}

    def declare(self, name: str, version: int) -> None:
        self.facts[name] = ServiceFact(
            name=name, version=version, base_url="http://x", qps_budget=version
        )

    async def read(self, position: int) -> Mapping[str, ServiceFact]:
        self.positions.append(position)
        await asyncio.sleep(0)
        if self.away:
            raise LogUnavailable("away")
        return dict(self.facts)

    def declarations(self) -> Declarations:
        return Declarations(self.read, Patience(5, lambda: self.now), lambda: self.now)


async def test_one_asks_for_all_and_what_is_known_is_kept_a_while() -> None:
    log = Log()
    log.declare("a", 1)
    declared = log.declarations()
    found = await asyncio.gather(*[declared.get("a", 7) for _ in range(20)])
    assert {fact.version for fact in found} == {1}
    assert log.positions == [7]
    log.declare("a", 2)
    assert (await declared.get("a", 8)).version == 1
    log.now += KEPT_S
    assert (await declared.get("a", 9)).version == 2
    assert log.positions == [7, 0], "what is known needs no position"


async def test_a_log_that_is_away_takes_nothing_back() -> None:
    log = Log()
    log.declare("a", 1)
    declared = log.declarations()
    await declared.get("a", 7)
    log.away, log.now = True, 100.0
    assert (await declared.get("a", 7)).version == 1
    with pytest.raises(LogUnavailable):
        await declared.get("b", 7)


async def test_what_is_not_declared_is_looked_for_and_then_given_up() -> None:
    log = Log()
    declared = log.declarations()
    with pytest.raises(NotDeclared):
        await declared.get("a", 7)
    log.now = 6.0
    with pytest.raises(Gone) as gone:
        await declared.get("a", 7)
    assert gone.value.code == "service_not_declared"
    log.declare("a", 1)
    assert (await declared.get("a", 7)).version == 1
