"""One outside service, as one replica asks it: budget, concurrency, retries, deadline, latency.

A call is answered, or it has failed for good (`ServiceFailed`). What it waits for the budget counts
for nothing: that is our restraint, not the service's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import aiohttp
from anyio import CapacityLimiter

from dsec.platform.budget import CLOSED_S_MAX
from dsec.platform.bus import Bucket
from dsec.platform.http_client import open_session
from dsec.platform.permits import Permits
from dsec.reward.batching import Batcher
from dsec.reward.http_exchange import (
    Again,
    Client,
    Exchange,
    ServiceFailed,
    exchange,
    exchange_batch,
)
from dsec.reward.services import Request, Response
from dsec.reward.standing import SharedStanding
from dsec.reward.switch import Latencies, Mode, Report, Standing
from dsec.reward.terms import Terms
from dsec.reward.under_way import Stopwatch, UnderWay
from dsec_contracts.service import ServiceBatch, ServiceFact

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""A replica reports nothing of a service that it has not asked for so long."""
ATTEMPT_SHARE = 1 / 3
"""Of the deadline, for one attempt, where the declaration does not say."""


class _BatchFailed(ServiceFailed):
    """Several calls in one request failed for good, and nobody knows for which of them."""


class Outside:
    """One service."""

    def __init__(
        self,
        fact: ServiceFact,
        bucket: Bucket,
        replica: str,
        environment: Mapping[str, str],
        clock: Callable[[], float],
        tell: Callable[[ServiceFact, Standing, float], Awaitable[None]],
        connections: Callable[[], aiohttp.ClientSession] = open_session,
    ) -> None:
        """Prepare; nothing is connected.

        Args:
            environment: where secrets are.
            clock: Unix seconds.
            tell: makes known that its rewards are deferred from now on, or no longer.
            connections: opens what requests go through, when the first one does.
        """
        self._connections = connections
        self._environment = environment
        self._clock = clock
        self._latencies = Latencies()
        self._calls: set[UnderWay] = set()
        self._queue = 0
        """Requests that wait for a place and an instant."""
        self._used_at = clock()
        self._permits = Permits(bucket, fact.name, clock)
        self._standing = SharedStanding(
            bucket,
            fact.name,
            replica,
            self._report,
            lambda: self._fact.latency_switch_ms,
            lambda standing, now: tell(self._fact, standing, now),
        )
        self._session: aiohttp.ClientSession | None = None
        self._places = CapacityLimiter(fact.concurrency_max)
        self._batcher: Batcher | None = None
        self.declared(fact)

    def declared(self, fact: ServiceFact) -> None:
        """From now on it is asked as this declaration says, by calls that are under way from their
        next attempt on; but how often these are tried stays."""
        self._fact = fact
        self._known: Terms | None = None
        self._permits.qps_budget = fact.qps_budget
        self._places.total_tokens = fact.concurrency_max
        if self._batcher is not None:
            self._batcher.hurry()
        self._batcher = None
        if (batch := fact.batch) is not None:
            send = partial(self._send_batch, batch)
            self._batcher = Batcher(send, batch.size_max, batch.wait_ms)

    @property
    def version(self) -> int:
        """Of the declaration that holds."""
        return self._fact.version

    @property
    def queue_s(self) -> float:
        """How long the requests that wait here for their turn take at least; other replicas have
        theirs."""
        return self._queue / self._fact.qps_budget

    async def mode(self) -> Mode:
        """Whether its rewards are deferred now."""
        self._used_at = self._clock()
        return await self._standing.mode()

    async def call(self, request: Request, key: str, *, batched: bool = False) -> Response:
        """What the service answers.

        Args:
            key: the idempotency key, the same for every attempt, also by another replica.
            batched: it may wait a moment for others, where the service takes several in one.

        Raises:
            ServiceFailed: `service_unavailable`, `service_deadline`, `service_invalid`,
                `secret_absent`.
            Later: this replica stops, and has not begun with it.
        """
        loop = asyncio.get_running_loop()
        call = UnderWay(request, key, Stopwatch(loop.time), batched and self._batcher is not None)
        self._calls.add(call)
        self._used_at = self._clock()
        try:
            return await self._retried(call)
        finally:
            self._calls.discard(call)
            self._latencies.add(self._clock(), call.stopwatch.seconds() * 1000)

    def stop(self) -> None:
        """Begin no more requests: calls that wait for one, a repeated one too, or for others to go
        with, raise `Later`."""
        self._permits.stop()
        if self._batcher is not None:
            self._batcher.hurry()

    async def close(self) -> None:
        """Ask nothing more."""
        self._permits.close()
        self._standing.close()
        if self._batcher is not None:
            self._batcher.close()
        if self._session is not None:
            await self._session.close()

    # -- attempts ------------------------------------------------------------------------------

    async def _retried(self, call: UnderWay) -> Response:
        try:
            return await call.retried(self._fact.retry, partial(self._left_s, call), self._attempt)
        except Again as again:
            raise ServiceFailed(again.code, f"{self._fact.name}: {again}") from again

    async def _attempt(self, call: UnderWay) -> Response:
        try:
            response = await self._asked(call)
        except Again as again:
            call.last = again
            call.excused_s += min(again.retry_after_s, CLOSED_S_MAX)
            raise
        if response.status in self._fact.retryable_statuses:
            call.last = Again("service_unavailable", f"HTTP {response.status}")
            raise call.last
        return response

    async def _asked(self, call: UnderWay) -> Response:
        # One that has little time left would cut short those beside it: it goes alone.
        old = self._left_s(call) < min(self._share_s, self._attempt_s_max)
        if call.batched and not old and self._batcher is not None:
            try:
                return await self._batcher.call(call)
            except _BatchFailed as failed:
                # One request that nobody can answer must not be the fault of those beside it.
                log.warning("%s; each is asked alone", failed)
                call.batched = False
        return await self._send(call)

    async def _send(self, call: UnderWay) -> Response:
        async with self._turn([call]) as (client, attempt_s):
            found = await exchange(client, call.request, call.key, attempt_s)
        return await self._heard(found)

    async def _send_batch(self, batch: ServiceBatch, calls: Sequence[UnderWay]) -> list[Response]:
        name, requests = self._fact.name, [call.request for call in calls]
        try:
            async with self._turn(calls) as (client, attempt_s):
                found, several = await exchange_batch(
                    client, batch.path, requests, calls[0].key, attempt_s
                )
            whole = await self._heard(found)
        except ServiceFailed as failed:
            if failed.code == "secret_absent":
                raise
            raise _BatchFailed(failed.code, f"{name}: a batch failed: {failed}") from failed
        if whole.status != 200:
            raise _BatchFailed("service_invalid", f"{name}: a batch got HTTP {whole.status}")
        return several

    @contextlib.asynccontextmanager
    async def _turn(self, calls: Sequence[UnderWay]) -> AsyncIterator[tuple[Client, float]]:
        """A place and an instant for one request; gives what it goes through, and how long it may
        take, in seconds."""
        self._terms()  # before anything is taken: without its secrets nothing is sent
        self._queue += 1
        async with contextlib.AsyncExitStack() as place:
            try:
                await place.enter_async_context(self._places)
                await self._permits.take()
            finally:
                self._queue -= 1
            client = self._http()  # with terms that may have been declared anew
            attempt_s = min(self._attempt_s_max, *map(self._left_s, calls))
            with contextlib.ExitStack() as running:
                for call in calls:
                    running.enter_context(call.stopwatch.running())
                yield client, max(0.001, attempt_s)

    @property
    def _share_s(self) -> float:
        return self._fact.deadline_s * ATTEMPT_SHARE

    @property
    def _attempt_s_max(self) -> float:
        """How long an attempt may take of a call that has so much left."""
        return self._fact.attempt_s_max or self._share_s

    def _left_s(self, call: UnderWay) -> float:
        """Of the call's deadline."""
        return self._fact.deadline_s + call.excused_s - call.stopwatch.seconds()

    async def _heard(self, found: Exchange) -> Response:
        """The response, unless it is to be asked for again."""
        if found.response.status in self._fact.retryable_statuses:
            if found.retry_after_s > 0:
                log.info("%s wants %.1f s of rest", self._fact.name, found.retry_after_s)
                await self._permits.leave_alone(found.retry_after_s)
            status = f"HTTP {found.response.status}"
            raise Again("service_unavailable", status, found.retry_after_s)
        return found.response

    def _terms(self) -> Terms:
        if self._known is None:
            self._known = Terms.of(self._fact, self._environment)
        return self._known

    def _http(self) -> Client:
        terms = self._terms()
        if self._session is None:
            self._session = self._connections()
        return Client(self._session, terms.fact.base_url, terms.headers, terms.secrets)

    def _report(self) -> Report | None:
        now = self._clock()
        if not self._calls and now - self._used_at > IDLE_S:
            return None
        under_way_ms = [call.stopwatch.seconds() * 1000 for call in self._calls]
        p95_ms = self._latencies.p95_ms(now, under_way_ms)
        return Report(now, p95_ms, len(self._calls), self._permits.waiting)
