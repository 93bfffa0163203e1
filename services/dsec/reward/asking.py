"""From what a row's function wants to its outcome: services are asked, the function runs again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from dsec.platform.bus import Bucket, Bus, Later
from dsec.platform.cancellation import cancelled
from dsec.platform.http_client import open_session
from dsec.platform.log import LogBehind, LogUnavailable
from dsec.platform.permits import STOPS
from dsec.platform.roles import SERVICES_BUCKET
from dsec.platform.specs import Absent, Gone
from dsec.reward.declarations import KEPT_S, Declarations
from dsec.reward.frames import Failure, Needs, Outcome, Task
from dsec.reward.http_exchange import ServiceFailed
from dsec.reward.outside import Outside
from dsec.reward.publishing import SOURCE
from dsec.reward.reexecution import Known, answered, recorded, request_hash
from dsec.reward.services import Request, Response
from dsec.reward.switch import Standing
from dsec_contracts import SYSTEM_SESSION, ServiceModeChanged, keys
from dsec_contracts.service import ServiceFact, ServiceModeCircumstance, ServiceModeFact

ROW_RESPONSES_BYTES_MAX = 8 << 20
"""What services may answer to one function for one step."""
LOOK_AGAIN_S_MIN = 0.2
LOOK_AGAIN_S_MAX = 5.0

Name = tuple[str, str, str, bytes]
"""What tells requests apart: service, method, path and the hash of the rest."""
_NOTHING: Mapping[Name, Sequence[Response]] = {}

Rescore = Callable[[Task], Awaitable[Outcome]]
"""Runs a row again, with what has been answered."""


class Asking(NamedTuple):
    """A row whose function wants responses. `key` names its step anywhere."""

    task: Task
    needs: Needs
    key: str
    position: int
    batched: bool
    services: frozenset[str]
    """Those that its spec names."""
    recorded: Mapping[Name, Sequence[Response]] = _NOTHING
    """What was answered before, each time that it was asked: not asked again. One that asks more
    often than before is told the last answer."""


class Answered(NamedTuple):
    """What came of a row, and what services answered for it."""

    outcome: Outcome
    responses: bytes


class Outsides:
    """The outside services that this replica has asked, by name."""

    def __init__(
        self,
        bus: Bus,
        declarations: Declarations,
        replica: str,
        environment: Mapping[str, str],
        clock: Callable[[], float],
        connections: Callable[[], aiohttp.ClientSession] = open_session,
    ) -> None:
        """Prepare; nothing is connected.

        Args:
            environment: where secrets are.
            clock: Unix seconds.
            connections: opens what the requests to one service go through.
        """
        self._bus = bus
        self._connections = connections
        self._declarations = declarations
        self._replica = replica
        self._environment = environment
        self._clock = clock
        self._opening = asyncio.Lock()
        self._bucket: Bucket | None = None
        self._services: dict[str, Outside] = {}
        self._stops = asyncio.Event()
        self._under_way: Counter[str] = Counter()
        """Calls, by service."""
        self._looking: asyncio.Task[None] | None = None

    async def get(self, name: str, position: int) -> Outside:
        """A service, as it is declared now. Waits for as long as nobody can say whether it is.

        Raises:
            Gone: it is not declared.
            Later: this replica stops, and nobody can say yet.
        """
        fact = self._declarations.known(name) or await self._looked_up(name, position)
        bucket = await self._shared()
        found = self._services.get(name)
        if found is None:
            found = Outside(
                fact,
                bucket,
                self._replica,
                self._environment,
                self._clock,
                self._tell,
                self._connections,
            )
            self._services[name] = found
        elif found.version != fact.version:
            found.declared(fact)
        return found

    async def _looked_up(self, name: str, position: int) -> ServiceFact:
        looking = AsyncRetrying(
            retry=retry_if_exception_type((Absent, LogBehind, LogUnavailable)),
            wait=wait_random_exponential(LOOK_AGAIN_S_MIN, LOOK_AGAIN_S_MAX),
            sleep=self._rest,
        )
        fact: ServiceFact = await looking(self._declarations.get, name, position)
        return fact

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stops.wait(), seconds)
        if self._stops.is_set():
            raise Later(0.0, STOPS)

    async def _tell(self, service: ServiceFact, standing: Standing, now: float) -> None:
        """Have it in the log, once, that a service's rewards are deferred or no longer are."""
        since_ms = int(standing.since * 1000)
        event = ServiceModeChanged(
            fact=ServiceModeFact(name=service.name, mode=standing.mode, since_ms=since_ms),
            circumstance=ServiceModeCircumstance(
                replica=self._replica,
                p95_ms=standing.p95_ms(now),
                latency_switch_ms=service.latency_switch_ms,
            ),
        )
        await self._bus.publish(
            event,
            service.name,
            source=SOURCE,
            time=datetime.fromtimestamp(self._clock(), UTC),
            # The same for every replica that says it: the server keeps one.
            event_id=f"service_mode.{service.name}.{since_ms}",
            cause=keys.of(SYSTEM_SESSION, keys.service(service.name, service.version)),
        )

    async def _shared(self) -> Bucket:
        async with self._opening:
            if self._bucket is None:
                self._bucket = await self._bus.bucket(SERVICES_BUCKET)
            return self._bucket

    def stop(self) -> None:
        """Begin no more requests: rows that wait for one, or for a declaration, are handed back
        (`Later`), those whose requests are under way end as ever."""
        self._stops.set()
        for service in self._services.values():
            service.stop()

    async def close(self) -> None:
        """Ask nothing more."""
        if self._looking is not None:
            self._looking.cancel()
        for service in self._services.values():
            await service.close()

    async def is_deferred(self, row: Asking) -> bool:
        """Whether any of the services that a row wants first is slow now."""
        if _undeclared(row, row.needs) is not None:
            return False  # its row will say so
        for name in dict.fromkeys(request.service for request in row.needs.requests):
            try:
                service = await self.get(name, row.position)
            except Gone:
                return False  # its row will say so
            if await service.mode() == "deferred":
                return True
        return False

    def queue_s(self, row: Asking) -> float:
        """How long, at least, the shortest queue lasts for what a row wants first."""
        names = {request.service for request in row.needs.requests}
        queues = [self._services[name].queue_s for name in names if name in self._services]
        return min(queues, default=0.0)

    async def answer(self, row: Asking, rescore: Rescore) -> Answered:
        """What comes of a row once everything it wants has been answered, or cannot be."""
        known: list[Known] = []
        outcome: Outcome = row.needs
        while isinstance(outcome, Needs):
            if (refused := _undeclared(row, outcome)) is not None:
                return Answered(refused, recorded(known))
            found = await self._responses(row, outcome.requests, known)
            asked = list(zip(outcome.requests, found, strict=True))
            heard = [(one, told) for one, told in asked if isinstance(told, Response)]
            known = answered([one for one, _ in heard], [told for _, told in heard], known)
            if (
                error := next((e for e in found if isinstance(e, BaseException)), None)
            ) is not None:
                return Answered(_failure(error), recorded(known))
            if sum(len(one.body) for one in known) > ROW_RESPONSES_BYTES_MAX:
                told = f"services answered more than {ROW_RESPONSES_BYTES_MAX} bytes for one step"
                return Answered(Failure("responses_too_large", told), b"")
            outcome = await rescore(row.task._replace(responses=recorded(known)))
        return Answered(outcome, recorded(known))

    async def _responses(
        self, row: Asking, requests: tuple[Request, ...], before: Sequence[Known]
    ) -> list[Response | BaseException]:
        times: Counter[Name] = Counter(one[:4] for one in before)
        calls = []
        for n, request in enumerate(requests, len(before)):
            name = (request.service, request.method, request.path, request_hash(request))
            if told := row.recorded.get(name):
                calls.append(_told(told[min(times[name], len(told) - 1)]))
            else:
                calls.append(self._call(row, request, f"{row.key}.{n}"))
            times[name] += 1
        # Not a task group: the trouble of one call must not stop another in its midst.
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, row: Asking, request: Request, key: str) -> Response:
        name = request.service
        service = await self.get(name, row.position)
        self._under_way[name] += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_again())
        try:
            return await service.call(request, key, batched=row.batched)
        finally:
            self._under_way[name] -= 1

    async def _look_again(self) -> None:
        """Have services asked as they are declared now by calls that are under way, too. Where all
        callers wait for them, nobody else asks how that is."""
        with contextlib.suppress(Later):
            while not cancelled():
                await asyncio.sleep(KEPT_S)
                names = [name for name, calls in self._under_way.items() if calls]
                if not names:
                    return
                for name in names:
                    await self.get(name, 0)


def _undeclared(row: Asking, needs: Needs) -> Failure | None:
    """Why a row's requests are not made: user code's process may say that it wants anything."""
    asked = next((r.service for r in needs.requests if r.service not in row.services), None)
    if asked is None:
        return None
    return Failure(
        "service_not_declared",
        f"the function asks service {asked!r:.80}, which its spec does not name: name it in "
        "@dsec.reward(services=[...]) and register the spec anew",
    )


def _failure(error: BaseException) -> Failure:
    """What a call that has failed for good makes of its row.

    Raises:
        error: it is none that a session is told: the tick comes again.
    """
    if isinstance(error, ServiceFailed):
        return Failure(error.code, str(error), fatal=False)
    if isinstance(error, Gone):
        return Failure(error.code, str(error))
    raise error


async def _told(response: Response) -> Response:
    return response
