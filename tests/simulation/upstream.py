"""Upstream: who registers specs, asks for sessions and takes some back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation import market, programs

from dsec.platform.bus import Bus
from dsec_contracts import (
    ServiceDeclared,
    SessionCancelRequested,
    SessionRequested,
    SpecRegistered,
    keys,
)
from dsec_contracts.session import CancelFact, RequestFact
from dsec_contracts.spec import SpecFact

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(slots=True)
class Session:
    """A session that is asked for."""

    kind: programs.Kind
    request: RequestFact
    cancelled: bool = False


def cancelling(session: Session) -> Callable[[World, Bus], Coroutine[Any, Any, None]]:
    """Somebody who asks that a session end."""

    async def cancel(world: World, bus: Bus) -> None:
        session_id = session.request.session_id
        event = SessionCancelRequested(fact=CancelFact(session_id=session_id))
        event_id = f"{session_id}.cancel"
        await bus.publish(
            event,
            session_id,
            source="simulation",
            time=world.now(),
            event_id=event_id,
            session_id=session_id,
        )

    return cancel


async def requesting(world: World, bus: Bus) -> None:
    """Whoever registers the specs, declares the service and asks for the sessions."""
    for spec_hash, (kind, content) in programs.SPECS.items():
        told = {"spec_hash": spec_hash, "kind": kind, "content": content}
        fact = SpecFact.model_validate(told)
        await bus.publish(
            SpecRegistered(fact=fact),
            spec_hash,
            source="simulation",
            time=world.now(),
            event_id=keys.spec(spec_hash).replace(":", "."),
        )
    name = keys.service(market.NAME, market.DECLARED.version).replace(":", ".")
    await bus.publish(
        ServiceDeclared(fact=market.DECLARED),
        market.NAME,
        source="simulation",
        time=world.now(),
        event_id=name,
    )
    pairs = zip(world.plan.asked_at_s, world.sessions, strict=True)
    for at_s, session in sorted(pairs, key=lambda pair: pair[0]):
        await asyncio.sleep(max(0.0, at_s - world.loop.time()))
        session_id = session.request.session_id
        await bus.publish(
            SessionRequested(fact=session.request),
            session_id,
            source="simulation",
            time=world.now(),
            event_id=str(session_id),
            session_id=session_id,
        )
