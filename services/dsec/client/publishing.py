"""What a client publishes: specs, policies, requests, cancels. One function an event.

Every event id is made from what the event is about, so that sending it again is the same event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

from dsec.client.endpoints import ClientError
from dsec.client.queries import request_event_id
from dsec.client.sealing import SealedSpec
from dsec.platform.bus import Bus, BusError
from dsec.platform.objects import ObjectStore
from dsec.platform.telemetry import parse_traceparent
from dsec_contracts import (
    PolicyPublished,
    SessionCancelRequested,
    SessionRequested,
    SpecRegistered,
)
from dsec_contracts.session import CancelCircumstance, CancelFact, RequestCircumstance, RequestFact
from dsec_contracts.spec import PolicyCircumstance, PolicyFact, SpecCircumstance, SpecFact

SOURCE = "dsec/client"
PUBLISHES_IN_FLIGHT_MAX = 256
MESSAGE_OVERHEAD_BYTES = 4096


class RequestIncomplete(ClientError):
    """Some of the sessions were requested, and of the others nobody can say."""

    def __init__(self, acknowledged: int, facts: Sequence[RequestFact], reason: object) -> None:
        super().__init__(
            f"{acknowledged} of {len(facts)} sessions of group {facts[0].group_id} are known "
            f"to be requested, then: {reason}; `Client.request` with the same arguments requests "
            "the rest, under the same ids"
        )


async def publish_spec(
    bus: Bus, objects: Callable[[], ObjectStore], spec: SealedSpec, now: datetime
) -> None:
    """Register a spec; what is too large for a message goes to the object store."""
    content, blob = spec.content, None
    if len(content) * 4 // 3 + MESSAGE_OVERHEAD_BYTES > bus.max_payload_bytes:
        blob = await asyncio.to_thread(objects().put, content)
        content = b""
    fact = {"spec_hash": spec.spec_hash, "kind": spec.kind, "content": content, "blob": blob}
    told = SpecCircumstance(
        name=spec.name,
        services=sorted(getattr(spec.document, "services", ())),
        per_episode=getattr(spec.document, "per", "") == "episode",
    )
    await bus.publish(
        SpecRegistered(
            fact=SpecFact.model_validate(fact),
            circumstance=told,
        ),
        spec.spec_hash,
        source=SOURCE,
        time=now,
        event_id=f"spec.{spec.spec_hash}",
    )


async def publish_policy(bus: Bus, fact: PolicyFact, client: str, now: datetime) -> None:
    """Announce weights that lie in the object store."""
    await bus.publish(
        PolicyPublished(fact=fact, circumstance=PolicyCircumstance(client=client)),
        f"{fact.name}-{fact.version}",
        source=SOURCE,
        time=now,
        event_id=f"policy.{fact.name}.{fact.version}",
    )


async def publish_requests(
    bus: Bus, facts: Sequence[RequestFact], client: str, traceparent: str | None = None
) -> None:
    """Request sessions, many at once, each acknowledged.

    Args:
        traceparent: of the span that asks for them.

    Raises:
        RequestIncomplete: not all of them were. Publishing the same facts again requests the rest.
    """
    acknowledged = 0
    circumstance = RequestCircumstance(client=client)
    upstream = traceparent if parse_traceparent(traceparent) else None
    in_flight = asyncio.Semaphore(PUBLISHES_IN_FLIGHT_MAX)

    async def publish(fact: RequestFact) -> None:
        nonlocal acknowledged
        async with in_flight:
            await bus.publish(
                SessionRequested(fact=fact, circumstance=circumstance),
                fact.session_id,
                source=SOURCE,
                time=fact.creation_timestamp,
                event_id=request_event_id(fact.session_id),
                session_id=fact.session_id,
                traceparent=upstream,
            )
            acknowledged += 1

    try:
        async with asyncio.TaskGroup() as group:
            for fact in facts:
                group.create_task(publish(fact))
    except* (BusError, OSError) as errors:
        raise RequestIncomplete(acknowledged, facts, errors.exceptions[0]) from errors


async def publish_cancel(bus: Bus, session_id: UUID, reason: str | None, now: datetime) -> None:
    """Ask that a session end."""
    await bus.publish(
        SessionCancelRequested(
            fact=CancelFact(session_id=session_id), circumstance=CancelCircumstance(reason=reason)
        ),
        session_id,
        source=SOURCE,
        time=now,
        event_id=f"{session_id}.cancel_requested",
        session_id=session_id,
    )
