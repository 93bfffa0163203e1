"""The client: registers specs, requests sessions, publishes weights, reads episodes.

It publishes to the bus and reads the log; it never asks a service. Requests are published once
and acknowledged, so a session runs whether or not its client stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import uuid_utils.compat
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.client.endpoints import ClientError, find_endpoints, stack_folder
from dsec.client.episodes import Episode, episodes_of, rejected_episode
from dsec.client.publishing import (
    publish_cancel,
    publish_policy,
    publish_requests,
    publish_spec,
)
from dsec.client.queries import Queries, Summary
from dsec.client.requests import request_facts
from dsec.client.sealing import SealedSpec
from dsec.client.specs import SessionPlan, read_session, read_spec
from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.engine import is_away
from dsec.platform.log import LogReader, Position
from dsec.platform.objects import ObjectStore
from dsec.platform.stack.room import full_disk
from dsec.session import log_row
from dsec_contracts import canonical
from dsec_contracts.session import RequestFact
from dsec_contracts.spec import PolicyFact, SpecKind

POLL_S_MIN = 0.05
POLL_S_MAX = 0.5
AWAY_S_MAX = 120.0
"""How long the log's database may be away while sessions are waited for."""
AWAY_PAUSE_S_MAX = 5.0
DISK_LOOK_S = 2.0
"""How often it is looked at whether the disk of a stack that takes nothing is full."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that were requested together."""

    group_id: str
    session_ids: tuple[UUID, ...]


Sessions = Group | Sequence[UUID]


class Client:
    """An async context manager; connections are made when they are first needed.

    Args:
        nats_url, database_url, object_store_url: servers; by default those of `DSEC_*` variables
            or of the embedded stack that runs here.
        state_dir: of the embedded stack to use.
        name: what the connection to the bus is called, for whoever looks at the server; it stands
            in requests and policies as who asked.
    """

    def __init__(
        self,
        *,
        nats_url: str | None = None,
        database_url: str | None = None,
        object_store_url: str | None = None,
        state_dir: Path | None = None,
        name: str = "client",
    ) -> None:
        self._disk = None if nats_url and database_url else stack_folder(state_dir)
        if not (nats_url and database_url):
            found = find_endpoints(state_dir)
            nats_url = nats_url or found.nats_url
            database_url = database_url or found.database_url
            object_store_url = object_store_url or found.object_store_url
        self.nats_url = nats_url
        self.database_url = database_url
        self.object_store_url = object_store_url or ""
        self.name = name
        self.queries = Queries.connect(database_url)
        self._bus: Bus | None = None
        self._log: LogReader | None = None
        self._connecting = asyncio.Lock()
        self._registered: set[str] = set()
        self._unfinished: dict[str, tuple[Group, list[RequestFact]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bus is not None:
            await self._bus.close()
        if self._log is not None:
            await self._log.close()
        await self.queries.close()

    async def bus(self) -> Bus:
        """The bus, connected."""
        async with self._connecting:
            if self._bus is None:
                self._bus = await Bus.connect(self.nats_url, self.name)
            return self._bus

    async def log(self) -> LogReader:
        """The log, connected."""
        async with self._connecting:
            if self._log is None:
                self._log = await LogReader.connect(self.database_url)
            return self._log

    def objects(self) -> ObjectStore:
        """The object store.

        Raises:
            ClientError: none is configured.
        """
        if not self.object_store_url:
            raise ClientError("no object store is configured: set DSEC_OBJECT_STORE_URL")
        return ObjectStore(self.object_store_url)

    # -- specs and policies --------------------------------------------------------------------

    async def register(
        self, kind: SpecKind, source: str | Path | Mapping[str, Any], *, check: bool = True
    ) -> str:
        """Register a spec from its file or document. Returns its hash; repeating changes nothing.

        Raises:
            SpecFileError: it cannot be used; names file, key and what to do.
        """
        return await self.register_sealed(read_spec(kind, source), check=check)

    async def register_sealed(self, spec: SealedSpec, *, check: bool = True) -> str:
        """Register a spec that was read before."""
        if spec.spec_hash in self._registered:
            return spec.spec_hash
        if check:
            # Imported here: it loads Gymnasium, which those who read the log can do without.
            from dsec.client.check import check_spec

            check_spec(spec)
        for tool in spec.tools:
            await self.register_sealed(tool, check=check)
        await self._taken(publish_spec(await self.bus(), self.objects, spec, utc_now()))
        self._registered.add(spec.spec_hash)
        return spec.spec_hash

    async def publish_policy(self, name: str, state: Mapping[str, Any]) -> str:
        """Publish weights, a mapping of names to tensors or arrays. Returns `name@version`.

        The version is the head of the content's hash, so the same weights are the same version.
        """
        data = canonical.encode(dict(state))
        key = await asyncio.to_thread(self.objects().put, data)
        version = key[:16]
        fact = PolicyFact(
            name=name, version=version, content_hash=key, blob=key, size_bytes=len(data)
        )
        await self._taken(publish_policy(await self.bus(), fact, self.name, utc_now()))
        return f"{name}@{version}"

    # -- sessions ------------------------------------------------------------------------------

    async def request(
        self,
        source: str | Path | Mapping[str, Any] | SessionPlan,
        *,
        policy: str | None = None,
        count: int = 1,
        seeds: str = "increment",
        group_id: str | None = None,
        seed: int | None = None,
        labels: Mapping[str, str] | None = None,
        traceparent: str | None = None,
        check: bool = True,
    ) -> Group:
        """Request sessions; they run from now on, whether or not anybody waits.

        Repeating a call that raised requests the same sessions, under the same ids: none runs
        twice. Repeating one that returned requests new ones.

        Args:
            source: session.yaml, or the document as a mapping.
            policy: `name@version`, as `publish_policy` returned it.
            seeds: `increment`: seed + i; `same`: all equal; `same_env`: the environment's seed
                held, the agent's chance varied.
            labels: added to the document's.
            traceparent: a W3C header that names a span of yours: the sessions' traces link to it.
                One that is malformed is passed over.

        Raises:
            SpecFileError: names file, key and what to do.
            RequestIncomplete: not all requests were acknowledged.
        """
        plan = source if isinstance(source, SessionPlan) else read_session(source)
        _check_policy(plan, policy)
        how = {"seeds": seeds, "seed": seed, "policy": policy, "labels": labels}
        asked = repr((plan.hashes(), plan.session, count, group_id, how))
        begun = self._unfinished.pop(asked) if asked in self._unfinished else None
        group, facts = begun or _new_sessions(plan, count, group_id, **how)
        try:
            if check:
                self._check_reward(plan)
                _check_curriculum(plan)
            for spec in plan.specs():
                if isinstance(spec, SealedSpec):
                    await self.register_sealed(spec, check=check)
            bus = await self.bus()
            await self._taken(publish_requests(bus, facts, self.name, traceparent))
        except BaseException:  # a cancellation too: who asks again means these
            self._unfinished[asked] = group, facts
            raise
        return group

    def _check_reward(self, plan: SessionPlan) -> None:
        """Try the reward function out on the session's environment, if both are here and new."""
        env, reward = plan.env, plan.reward
        if not isinstance(env, SealedSpec) or not isinstance(reward, SealedSpec):
            return
        if reward.spec_hash not in self._registered:
            from dsec.client.check_reward import check_reward  # loads Gymnasium

            check_reward(reward, env)

    async def cancel(self, ids: Iterable[UUID], reason: str | None = None) -> None:
        """Ask that sessions end. Those that are over already stay as they are.

        Raises:
            ClientError: the stack's disk is full.
        """
        bus = await self.bus()
        for session_id in ids:
            await self._taken(publish_cancel(bus, session_id, reason, utc_now()))

    async def _taken(self, publishing: Coroutine[Any, Any, None]) -> None:
        """Publish. A bus that is away is waited for, but not one whose disk is full: it says
        nothing, and does not come back by itself."""
        task = asyncio.create_task(publishing)
        try:
            while not (await asyncio.wait({task}, timeout=DISK_LOOK_S))[0]:
                if self._disk is not None and (sentence := full_disk(self._disk)) is not None:
                    raise ClientError(sentence)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        task.result()

    async def wait(
        self,
        sessions: Sessions,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Summary]:
        """Wait until all sessions are over. Returns their summaries, in the order of the ids.

        Args:
            on_progress: called with the number of sessions that are over.

        Raises:
            TimeoutError: not over within `timeout_s`.
        """
        ids = _ids(sessions)
        done = 0
        async with asyncio.timeout(timeout_s):
            async for finished in self.finished(ids):
                done += len(finished)
                if on_progress is not None:
                    on_progress(done)
        return await self.queries.summaries(ids)

    async def finished(self, ids: Sequence[UUID]) -> AsyncIterator[list[UUID]]:
        """Sessions as they are over, in the order in which they are found to be."""
        waiting = dict.fromkeys(ids)
        pause_s = POLL_S_MIN
        while waiting:
            over: set[UUID] = await _patiently(self._over, list(waiting))
            if over:
                pause_s = POLL_S_MIN
                found = [i for i in waiting if i in over]
                for session_id in found:
                    del waiting[session_id]
                yield found
            else:
                pause_s = min(POLL_S_MAX, pause_s * 1.5)
            if waiting:
                await asyncio.sleep(pause_s)

    async def _over(self, ids: list[UUID]) -> set[UUID]:
        over = await self.queries.ended(ids)
        return over | (await self.queries.rejections([i for i in ids if i not in over])).keys()

    async def position(self) -> Position:
        """Where the log stands. What is read as of it stays what it is."""
        return await (await self.log()).floor()

    async def episodes(
        self, group: Sessions, *, as_of: Position | None = None
    ) -> AsyncIterator[Episode]:
        """Whole episodes in columns, session by session as these are over.

        A session that failed, was cancelled or rejected yields its last episode with that status
        and its code: trainers see it, and decide.

        Args:
            as_of: a position of the log, as `position` gives it: the episodes that could be read
                there, with the rewards as they were then, whatever was revised since. Nothing is
                waited for, and sessions that were not over yet have none.
        """
        log = await self.log()
        get_blob = self.objects().get if self.object_store_url else _no_blob
        async for finished in self.finished(_ids(group)) if as_of is None else _once(_ids(group)):
            refused = await self.queries.rejections(finished, as_of)
            for session_id in finished:
                if as_of is None:
                    rows = await log.rows(session_id)
                else:
                    rows = await log.rows(session_id, upto=as_of.sequence, epoch=as_of.epoch)
                if any(row.kind == log_row.ENDED for row in rows):
                    for episode in episodes_of(session_id, rows, get_blob):
                        yield episode
                elif session_id in refused:
                    yield rejected_episode(session_id, refused[session_id][0], rows)


def _new_sessions(
    plan: SessionPlan, count: int, group_id: str | None, **how: Any
) -> tuple[Group, list[RequestFact]]:
    """Sessions that nobody has asked for yet, and what is to be published for them."""
    ids = [uuid_utils.compat.uuid7() for _ in range(count)]
    group = group_id or plan.session.group_id or str(uuid_utils.compat.uuid7())
    facts = request_facts(plan.session, plan.hashes(), ids, utc_now(), group_id=group, **how)
    return Group(group, tuple(ids)), facts


_patiently = AsyncRetrying(
    retry=retry_if_exception(is_away),
    wait=wait_random_exponential(POLL_S_MIN, AWAY_PAUSE_S_MAX),
    stop=stop_after_delay(AWAY_S_MAX),
    reraise=True,
)
"""The sessions go on while the database restarts; so does waiting for them."""


def _check_curriculum(plan: SessionPlan) -> None:
    """Try the environment with the session's curriculum level, if it is here."""
    level = plan.session.curriculum_level
    if level is not None and isinstance(plan.env, SealedSpec):
        from dsec.client.check import check_curriculum  # loads Gymnasium

        check_curriculum(plan.env, level)


async def _once(ids: list[UUID]) -> AsyncIterator[list[UUID]]:
    yield ids


def _ids(sessions: Sessions) -> list[UUID]:
    return list(sessions.session_ids if isinstance(sessions, Group) else sessions)


def _no_blob(key: str) -> bytes:
    raise ClientError(
        f"an observation lies in the object store (blob {key[:12]}), and none is configured: set "
        "DSEC_OBJECT_STORE_URL"
    )


def _check_policy(plan: SessionPlan, policy: str | None) -> None:
    if policy is None or isinstance(plan.agent, str) or plan.agent.document.policy is None:
        return
    wanted = plan.agent.document.policy.name
    if policy.partition("@")[0] != wanted:
        raise ClientError(
            f"policy {policy} is not for this agent: its spec names the policy {wanted!r}"
        )
