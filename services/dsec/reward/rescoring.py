"""Scoring anew: the rewards of a session that has ended, by another function, from its log.

Neither agent nor environment runs, and what the agent was given stays: the new rewards are a later
revision beside the old ones. What services answered when the session ran is used again wherever the
function asks the same; anything else they are asked now, within their budgets.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from dsec.platform.bus import Bus, Message, Settler
from dsec.platform.log import LogReader
from dsec.reward.asking import Answered, Asking, Name
from dsec.reward.batch import Batch
from dsec.reward.components import RewardError
from dsec.reward.effects import Lost, Spec, Specs, resolved
from dsec.reward.episodes import EPISODES_A_TURN_MAX, episode_task
from dsec.reward.frames import Failure, Needs, Outcome, Task
from dsec.reward.publishing import SOURCE
from dsec.reward.recorded_session import LANE, RecordedSession
from dsec.reward.reexecution import Known, read_recorded
from dsec.reward.services import Response
from dsec.reward.settings import RewardSettings
from dsec.reward.turns import Turns
from dsec.reward.waiting import Beside
from dsec_contracts import (
    Envelope,
    RewardRescored,
    RewardRescoreRequested,
    keys,
)
from dsec_contracts.canonical import decode
from dsec_contracts.reward import UNSCORED_MAX, RescoredCircumstance, RescoredFact, Unscored

log = logging.getLogger(__name__)

CONSUMER = "rescore"
ROWS_A_TURN_MAX = 64
"""Rows that are scored at a time: live ticks have their turn between."""
WITHIN = (
    "which would count beside that of its episode: where steps were rewarded, have them scored "
    "anew by a function of steps"
)


class Rescorer:
    """Scores sessions anew, one after the other."""

    def __init__(
        self,
        bus: Bus,
        reader: LogReader,
        specs: Specs,
        turns: Turns,
        beside: Beside,
        blobs: Callable[[str], bytes],
        settings: RewardSettings,
        now: Callable[[], datetime],
    ) -> None:
        self._bus = bus
        self._log = reader
        self._specs = specs
        self._turns = turns
        self._outsides, self._keep = beside.outsides, beside.keep
        self._blobs = blobs
        self._settings = settings
        self._now = now
        self._settler = Settler(
            bus,
            CONSUMER,
            self._handle,
            ack_wait_s=settings.reward_ack_wait_s,
            retry_s_min=settings.reward_retry_s_min,
            retry_s_max=settings.reward_retry_s_max,
        )

    async def on_reward_rescore_requested(self, message: Message) -> None:
        """Score one session anew and acknowledge; never raises."""
        await self._settler.handle(message)

    async def _handle(self, message: Message) -> None:
        event = message.event_of(RewardRescoreRequested)
        fact, envelope = event.fact, message.envelope()
        position = message.sequence
        if message.delivered > 1:  # what the replica that had it got to publish counts
            position = (await self._bus.stream_state()).last_sequence
        await self._log.wait_floor(position, self._settings.reward_spec_wait_s)
        first = await self._log.row(fact.session_id, keys.rescore_requested(fact.revision))
        if first is None or decode(first.fact)["reward_fn_hash"] != fact.reward_fn_hash:
            return  # another request for this revision came before
        if await self._log.row(fact.session_id, keys.rescored(fact.revision)) is not None:
            return
        session = RecordedSession.of(await self._log.rows(fact.session_id))
        done = RescoredFact(
            session_id=fact.session_id,
            revision=fact.revision,
            reward_fn_hash=fact.reward_fn_hash,
            scored=0,
            unscored=[],
            unscored_total=0,
        )
        if not session.requested:
            await self._say(envelope, done, "no_session", "the log has no such session")
        elif not session.ended:
            await self._say(envelope, done, "not_ended", "the session has not ended")
        else:
            spec = await self._specs.get(fact.reward_fn_hash, message.sequence)
            if spec.error is not None:
                await self._say(envelope, done, spec.error.code, spec.error.message)
            else:
                await self._score(envelope, session, spec, done)

    async def _score(
        self, envelope: Envelope, session: RecordedSession, spec: Spec, done: RescoredFact
    ) -> None:
        """Score and publish portion by portion, then say what came of it. What a replica that died
        has scored is not asked for again."""
        unscored, total, message = list[Unscored](), 0, ""
        episodes = session.episodes() if spec.per_episode else None
        if episodes and (step := session.rewarded_within(episodes)) is not None:
            told = f"step {step} has a reward of its own, {WITHIN}"
            await self._say(envelope, done, "rewarded_by_step", told)
            return
        rewarded = range(len(session.steps)) if episodes is None else list(episodes)
        left = [n for n in rewarded if not session.has(n, done.revision)]
        scored = len(rewarded) - len(left)
        size = ROWS_A_TURN_MAX if episodes is None else EPISODES_A_TURN_MAX
        for which in (left[start : start + size] for start in range(0, len(left), size)):
            batch = session.batch(done.reward_fn_hash, done.revision, which)
            tasks: list[Task | Failure] = []
            if episodes is not None:
                closed = [session.episode(episodes[n], n) for n in which]
                of = partial(episode_task, done.reward_fn_hash, blobs=self._blobs)
                tasks = [await asyncio.to_thread(of, steps) for steps in closed]
            elif not spec.is_env:
                tasks = [*await asyncio.to_thread(self._tasks, batch)]
            answers = await self._outcomes(session, batch, tasks, spec, envelope)
            for n, one in enumerate(answers):
                if isinstance(one.outcome, Failure):
                    total += 1
                    message = message or one.outcome.message
                    unscored.append(Unscored(step=batch.steps[n], code=one.outcome.code))
            scored += await self._publish(envelope, batch, answers)
        found = {"scored": scored, "unscored": unscored[:UNSCORED_MAX], "unscored_total": total}
        await self._say(envelope, done.model_copy(update=found), message=message)

    async def _outcomes(
        self,
        session: RecordedSession,
        batch: Batch,
        tasks: Sequence[Task | Failure],
        spec: Spec,
        envelope: Envelope,
    ) -> list[Answered]:
        if spec.is_env:
            return [Answered(one, b"") for one in batch.env_outcomes()]
        contents = {batch.specs[0]: spec.content}
        whole = [one for one in tasks if isinstance(one, Task)]
        scored = iter(await self._turns.score(whole, contents))
        outcomes = [next(scored) if isinstance(one, Task) else one for one in tasks]
        asking = dict[int, Asking]()
        for n, (task, one) in enumerate(zip(tasks, outcomes, strict=True)):
            if isinstance(one, Needs) and isinstance(task, Task):
                try:
                    asking[n] = await self._asking(session, batch, task, one, spec, n, envelope)
                except RewardError as error:
                    # To ask anew what was answered would be another reward's truth.
                    outcomes[n] = Failure(error.code, error.message)
        again = partial(self._turns.again, content=spec.content)
        answers = await asyncio.gather(
            *[self._outsides.answer(row, again) for row in asking.values()]
        )
        found = {n: await self._keep.kept(one) for n, one in zip(asking, answers, strict=True)}
        return [found.get(n) or Answered(one, b"") for n, one in enumerate(outcomes)]

    async def _asking(
        self,
        session: RecordedSession,
        batch: Batch,
        task: Task,
        needs: Needs,
        spec: Spec,
        n: int,
        envelope: Envelope,
    ) -> Asking:
        answers = session.answers.get(batch.steps[n], b"")
        whole = await asyncio.to_thread(resolved, answers, self._blobs)
        if isinstance(whole, Lost):
            raise RewardError("blob_not_found", whole.decode())
        recorded = read_recorded(whole)
        key = f"{envelope.id}.{batch.steps[n]}"
        return Asking(task, needs, key, 0, True, spec.services, _by_request(recorded))

    def _tasks(self, batch: Batch) -> list[Task]:
        return [
            task._replace(
                observation=resolved(task.observation, self._blobs),
                next_observation=resolved(task.next_observation, self._blobs),
            )
            for task in batch.tasks(range(batch.event.rows))
        ]

    async def _publish(self, envelope: Envelope, batch: Batch, found: Sequence[Answered]) -> int:
        outcomes: list[Outcome | None] = [
            None if isinstance(one.outcome, Failure) else one.outcome for one in found
        ]
        responses = {n: one.responses for n, one in enumerate(found) if one.responses}
        limit, count = self._bus.max_payload_bytes, 0
        replica = self._settings.reward_replica
        for scored in batch.scored(outcomes, replica, limit, responses):
            # Named by its rows: made again after a crash, with other answers of services, others
            # may have a reward, and the server drops what it takes for a repetition.
            rows = hashlib.sha256(scored.row.step).hexdigest()[:16]
            await self._bus.publish(
                scored,
                LANE,
                source=SOURCE,
                time=self._now(),
                event_id=f"reward.{envelope.id}.rows.{rows}",
                traceparent=envelope.traceparent,
            )
            count += scored.rows
        return count

    async def _say(
        self, envelope: Envelope, fact: RescoredFact, code: str = "", message: str = ""
    ) -> None:
        if code:
            log.warning("%s revision %d: %s", fact.session_id, fact.revision, code)
        told = RescoredCircumstance(replica=self._settings.reward_replica, message=message)
        session = fact.session_id
        await self._bus.publish(
            RewardRescored(fact=fact.model_copy(update={"code": code}), circumstance=told),
            session,
            source=SOURCE,
            time=self._now(),
            event_id=f"{session}.rescored.{fact.revision}.{fact.reward_fn_hash[:16]}",
            session_id=session,
            cause=keys.of(session, keys.rescore_requested(fact.revision)),
            traceparent=envelope.traceparent,
        )


def _by_request(recorded: Sequence[Known]) -> Mapping[Name, Sequence[Response]]:
    """The answers to each request, in the order in which they came."""
    found: dict[Name, list[Response]] = {}
    for one in recorded:
        found.setdefault(one[:4], []).append(Response(one.status, one.headers, one.body))
    return found
