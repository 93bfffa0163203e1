"""The client: registers specs, requests sessions, publishes weights, reads episodes.

It publishes to the bus and reads the log; it never asks a service. Requests are published once
and acknowledged, so a session runs whether or not its client stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import uuid_utils.compat

from dsec.client.connections import Connections
from dsec.client.endpoints import ClientError
from dsec.client.episodes import Episode, episodes_of, rejected_episode
from dsec.client.publishing import (
    publish_cancel,
    publish_policy,
    publish_requests,
    publish_spec,
)
from dsec.client.queries import Summary
from dsec.client.requests import request_facts
from dsec.client.sealing import SealedSpec
from dsec.client.specs import SessionPlan, read_session, read_spec
from dsec.client.waiting import finished
from dsec.platform.clock import utc_now
from dsec.platform.log import Position
from dsec.session import log_row
from dsec_contracts import canonical
from dsec_contracts.session import RequestFact
from dsec_contracts.spec import PolicyFact, SpecKind


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that were requested together."""

    group_id: str
    session_ids: tuple[UUID, ...]


Sessions = Group | Sequence[UUID]


class Client(Connections):
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
        super().__init__(
            nats_url=nats_url,
            database_url=database_url,
            object_store_url=object_store_url,
            state_dir=state_dir,
            name=name,
        )
        self._registered: set[str] = set()
        self._unfinished: dict[str, tuple[Group, list[RequestFact]]] = {}

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
        """Publish weights. Returns `name@version`.

        The version is the head of the content's hash, so the same weights are the same version.

        Args:
            state: names to torch tensors or numpy arrays, as `state_dict()` gives them: of any
                shape, and of a type that numpy has (no bfloat16). Types and bits are kept.

        Raises:
            CanonicalError: a value that cannot be kept exactly; names it.
            ClientError: there is no object store, or the stack's disk is full.
            ObjectStoreError: it cannot be written to.
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
            async for over in finished(self.queries, ids):
                done += len(over)
                if on_progress is not None:
                    on_progress(done)
        return await self.queries.summaries(ids)

    def finished(self, ids: Sequence[UUID]) -> AsyncIterator[list[UUID]]:
        """Sessions as they are over, in the order in which they are found to be."""
        return finished(self.queries, ids)

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
        ids = _ids(group)
        async for over in finished(self.queries, ids) if as_of is None else _once(ids):
            refused = await self.queries.rejections(over, as_of)
            for session_id in over:
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
