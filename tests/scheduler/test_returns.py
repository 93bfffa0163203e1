"""The returns of episodes, and that they follow from the log alone, whoever reads it and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.scheduler.conftest import CONFIG, World
from tests.scheduler.test_curriculum import Beating, changes, event_of, logged, recalled
from tests.scheduler.test_decider import AGENT, session_id

from dsec.scheduler import curriculum, recall
from dsec.scheduler.curriculum import Curricula, Rules, decide_levels
from dsec.scheduler.episodes import Ended
from dsec.scheduler.intents import ChangeLevel
from dsec.scheduler.portions import Portion, Unread
from dsec.scheduler.returns import Episode, Window
from dsec_contracts import CurriculumChanged, RewardMissing, SessionEnded, keys
from dsec_contracts.reward import RewardNoticeFact
from dsec_contracts.session import EndedFact

OTHER = "d" * 64
WHOLE = "f" * 64
"""A reward spec that scores whole episodes."""


# -- a window --------------------------------------------------------------------------------------


def window_of(*returns: float, n: int = 2, threshold: float = 0.75) -> Window:
    window = Window(n, threshold, 1.0)
    for at, value in enumerate(returns, 1):
        window.add(episode(at, value))
    return window


def episode(at: int, value: float) -> Episode:
    return Episode((at, 0), value, session_id(1), at)


def test_the_first_episode_counts_with_which_a_level_was_mastered() -> None:
    window = window_of(1.0, 0.0, 0.5, 1.0, 1.0, 0.0)
    found = [window.mastered(since) for since in range(7)]
    assert [one and one.episode.step for one in found] == [4, 4, 4, 4, 5, None, None]
    assert found[0] is not None
    assert (found[0].mean, found[0].cause) == (0.75, keys.of(session_id(1), keys.step(4)))


def test_where_the_newest_episode_shows_it_a_session_need_not_have_seen_it() -> None:
    assert window_of(1.0, 0.0, 1.0).mastered(9) is None
    late = window_of(1.0, 0.0, 1.0, 1.0).mastered(9)
    assert late is not None
    assert late.episode.step == 4


def test_however_many_are_read_at_once_each_is_judged() -> None:
    """The mastery of a moment is seen also where a hundred episodes behind it come with it."""
    window = window_of(*[0.0] * 5, 1.0, 1.0, *[0.0] * 100)
    found = window.mastered(0)
    assert found is not None
    assert found.episode.step == 7
    assert len(window.episodes) == window.kept_max


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_window_does_not_depend_on_the_order_of_reading(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    values = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 0.85, 1.0, 3.0]), max_size=40))
    whole = [episode(at, value) for at, value in enumerate(values, 1)]
    one, two = Window(n, 0.7, 1.0), Window(n, 0.7, 1.0)
    for each in whole:
        one.add(each)
    for each in data.draw(st.permutations(whole + whole[:3])):
        two.add(each)
        if data.draw(st.booleans()):
            two.mastered(0)
    assert one.episodes == two.episodes == whole[-one.kept_max :]
    kept = [each.at[0] for each in one.episodes[n - 1 :]]
    assert [one.mastered(at - 1) for at in kept] == [two.mastered(at - 1) for at in kept]


# -- a log, and schedulers that read it ------------------------------------------------------------


@dataclass
class Step:
    """A logged step."""

    at: tuple[int, int]
    episode: int
    reward: float | None
    """None: it is missing."""
    rewarded_at: int
    """Where in the stream its reward, or that it has none, is."""
    last: bool
    change: int | None = None
    silent: bool = False
    """The episode is rewarded as a whole, and this is not its last step."""


@dataclass
class Played:
    """A session with a curriculum."""

    session_id: UUID
    agent: str
    level: int
    per_episode: bool
    steps: list[Step] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """(where in the stream, number, level)"""
    ended_at: int | None = None


@dataclass
class Log:
    """What the log has of sessions, up to a moment."""

    sessions: list[Played]
    now: int = 0
    steps_read: int = 0

    def of(self, one: UUID) -> Played:
        return next(played for played in self.sessions if played.session_id == one)

    def steps(self, played: Played) -> list[Step]:
        return [step for step in played.steps if step.at[0] <= self.now]

    async def ended_learners(self, epoch: int, sessions_max: int) -> list[Ended]:
        over = [one for one in self.sessions if one.ended_at and one.ended_at <= self.now]
        over.sort(key=lambda one: one.ended_at or 0, reverse=True)
        return [
            Ended(
                one.session_id,
                (one.ended_at or 0, 0),
                len(one.steps),
                one.agent,
                one.level,
                WHOLE if one.per_episode else "",
            )
            for one in over[:sessions_max]
        ]

    async def steps_of(self, session_ids: list[UUID]) -> dict[UUID, int]:
        return {one: len(self.steps(self.of(one))) for one in session_ids}

    async def changes_of(self, session_ids: list[UUID]) -> dict[UUID, dict[int, int]]:
        return {
            one: {n: level for at, n, level in self.of(one).changes if at <= self.now}
            for one in session_ids
        }

    async def episodes(self, unread: list[Unread], epoch: int) -> list[Portion]:
        found = []
        for asked in unread:
            steps = self.steps(self.of(asked.session_id))
            asked_for = list(enumerate(steps))[asked.first_step : asked.last_step + 1]
            self.steps_read += len(asked_for)
            for number, group in groupby(asked_for, lambda pair: pair[1].episode):
                found.append(self._portion(asked.session_id, number, list(group)))
        return found

    def _portion(self, one: UUID, number: int, group: list[tuple[int, Step]]) -> Portion:
        known = [step for _, step in group if step.rewarded_at <= self.now and not step.silent]
        rewards = [step.reward for step in known if step.reward is not None]
        index, last = group[-1]
        at = last.at if last.last else None
        missing = len(known) - len(rewards)
        return Portion(one, number, len(group), index, rewards, missing, at, last.change)


class Reader:
    """What a scheduler has of the sessions, of which it follows the stream."""

    def __init__(self, log: Log, rules: Rules, *, recalled: bool = False) -> None:
        self.log = log
        self.curricula = Curricula(rules)
        self.curricula.recalled = recalled
        self._seen = -1
        self._taken: set[UUID] = set()
        self._ended_before = 0 if recalled else log.now
        """What ended by then it takes no notice of, as a scheduler that starts does."""

    def follow(self) -> None:
        """Take what the stream has, and hear how far the sessions are."""
        for played in self.log.sessions:
            one = played.session_id
            over = played.ended_at is not None and played.ended_at <= self.log.now
            if over and (played.ended_at or 0) <= self._ended_before:
                continue
            if one not in self._taken:  # one that has ended meanwhile, too: it began before
                self._taken.add(one)
                self._add(played)
            for at, n, level in played.changes:
                if self._seen < at <= self.log.now:
                    told = ChangeLevel(one, n, level, 0, "rewards_lag", "", "")
                    self.curricula.changed(event_of(told), at)
            self.curricula.hear(one, 0, len(self.log.steps(played)), 0.0)
            if over and one in self.curricula.learners:
                self.curricula.ended(one, len(played.steps))
        self._seen = self.log.now

    def _add(self, played: Played) -> None:
        whole = played.per_episode
        self.curricula.add(played.session_id, played.agent, played.level, 0, per_episode=whole)

    async def read(self, rounds: int) -> None:
        for _ in range(rounds):
            if not self.curricula.recalled:
                await recall.recall(self.log, self.curricula, 1, {WHOLE})
            elif unread := self.curricula.unread():
                self.curricula.read(await self.log.episodes(unread, 1))

    def windows(self) -> dict[tuple[str, int], list[Episode]]:
        found = self.curricula.returns.windows
        return {place: found[place].episodes for place in sorted(found)}

    def levels(self) -> dict[UUID, int]:
        return {one: each.read_level for one, each in self.curricula.learners.items()}


def play(random: Random, *, sessions: int, episodes: int, late: bool = True) -> Log:
    """Sessions that run side by side, some of which end."""
    all_of_them = []
    for n in range(1, random.randint(1, sessions) + 1):
        agent, level = random.choice([AGENT, OTHER]), random.randint(0, 2)
        all_of_them.append(Played(session_id(n), agent, level, random.random() < 0.3))
    log = Log(all_of_them)
    lines = {played.session_id: _play(random, played, episodes, late) for played in all_of_them}
    while lines:
        log.now += 1
        for index, one in enumerate(random.sample(sorted(lines), random.randint(1, len(lines)))):
            step = next(lines[one], None)
            if step is None:
                del lines[one]
                if random.random() < 0.7:
                    log.of(one).ended_at = log.now
                continue
            step.at = log.now, index
            step.rewarded_at += log.now
            log.of(one).steps.append(step)
            if step.change is not None:
                level = random.randint(0, 2)
                log.of(one).changes.append((log.now - 1, step.change, level))
    return log


def _play(random: Random, played: Played, episodes: int, late: bool) -> Iterator[Step]:
    change = 0
    for number in range(random.randint(0, episodes)):
        length = random.randint(1, 5)
        for step in range(length):
            last = step == length - 1
            reward = None if random.random() < 0.02 else random.choice([0.1, 0.2, 0.3, 0.7])
            delay = random.choice([0, 0, 0, 3, 30]) if late else 0
            silent = played.per_episode and not last
            named = None
            if last and random.random() < 0.15:
                change += random.randint(1, 2)  # of two that wait the last one is delivered
                named = change
            yield Step((0, 0), number, reward, delay, last, named, silent)
    for _ in range(random.randint(0, 2)):  # of an episode that is cut
        yield Step((0, 0), episodes, 0.5, 0, False, None, played.per_episode)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 4))
def test_who_takes_over_has_the_returns_of_who_led(seed: int, n: int) -> None:
    """Whenever it takes over: also of sessions that have ended, at their levels, and what comes
    after it counts as it would have."""
    asyncio.run(_takes_over(Random(seed), Rules(transition_episodes=n, return_target=1.0)))


async def _takes_over(random: Random, rules: Rules) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (curriculum, recall):
            patch.setattr(module, "STEPS_AT_ONCE_MAX", random.choice([1, 3, 7, 2_000]))
            patch.setattr(module, "SESSIONS_AT_ONCE_MAX", random.choice([1, 2, 64]))
        patch.setattr(recall, "LAG_STEPS_MAX", 36)  # as far back as rewards come late here
        log = play(random, sessions=6, episodes=random.choice([12, 40]))
        end, log.now = log.now + 40, 0
        led = Reader(log, rules, recalled=True)
        led.follow()
        while log.now < random.randint(0, end):
            log.now += random.randint(1, 5)
            led.follow()
            await led.read(random.randint(0, 2))
        led.follow()
        await led.read(300)
        new = Reader(log, rules)
        new.follow()
        await new.read(300)
        assert new.windows() == led.windows()
        log.now = end
        for one in (led, new):
            one.follow()
            await one.read(300)
        assert new.windows() == led.windows()
        assert new.levels() == led.levels()


@settings(max_examples=100, deadline=None)
@example(seed=1242670364)  # a session that begins and ends between two looks
@given(seed=st.integers(0, 2**32))
def test_a_level_moves_with_the_same_episode_whoever_leads(seed: int) -> None:
    """Who looks after every step, who looks once, who takes over when all has happened, and who
    takes over now and then: their first changes are the same."""
    random = Random(seed)
    rules = Rules(transition_episodes=20, return_target=1.0, transition_threshold=0.7, level_max=9)
    log = play(random, sessions=4, episodes=9, late=False)  # of a place no more than are kept
    for played in log.sessions:
        played.ended_at = None if played.session_id == session_id(1) else played.ended_at

    async def led(looks: list[int], taken_over: list[int]) -> dict[UUID, tuple[int, str]]:
        log.now = 0
        found: dict[UUID, tuple[int, str]] = {}
        reader = Reader(log, rules, recalled=True)
        for now in sorted({*looks, *taken_over}):
            log.now = now
            if now in taken_over:
                reader = Reader(log, rules)
            reader.follow()
            await reader.read(2)
            for change in decide_levels(reader.curricula, lambda _: "w1-0"):
                if change.previous_level == log.of(change.session_id).level:
                    found.setdefault(change.session_id, (change.level, change.cause))
        return found

    end = log.now
    for played in log.sessions:
        played.changes.clear()
        for step in played.steps:
            step.change = None
    always = asyncio.run(led(list(range(1, end + 1)), []))
    stays = {one.session_id for one in log.sessions if not one.ended_at}
    once = asyncio.run(led([end], []))
    new = asyncio.run(led([end], [end]))
    often = asyncio.run(led(list(range(1, end + 1)), random.sample(range(1, end + 1), end // 3)))
    for other in (once, new, often):
        assert {one: other.get(one) for one in stays} == {one: always.get(one) for one in stays}


# -- the bounds ------------------------------------------------------------------------------------


def ended_sessions(count: int, episodes: int) -> Log:
    """Sessions of one agent at one level, one after the other; of an episode's two steps."""
    log = Log([])
    for n in range(1, count + 1):
        played = Played(session_id(n), AGENT, 3, False)
        for number in range(2 * episodes):
            log.now += 1
            played.steps.append(Step((log.now, 0), number // 2, 0.5, log.now, number % 2 == 1))
        log.now += 1
        played.ended_at = log.now
        log.sessions.append(played)
    return log


async def test_of_sessions_that_are_too_old_to_count_nothing_is_read() -> None:
    log = ended_sessions(500, 3)
    reader = Reader(log, Rules(transition_episodes=10, return_target=1.0))
    await reader.read(1)
    [kept] = reader.windows().values()
    assert [one.session_id for one in kept[-6:]] == [session_id(499)] * 3 + [session_id(500)] * 3
    assert len(kept) == 20
    assert log.steps_read == 6 * recall.SESSIONS_AT_ONCE_MAX


async def test_the_newest_are_read_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recall, "RECALLED_STEPS_MAX", 5)
    monkeypatch.setattr(recall, "SESSIONS_AT_ONCE_MAX", 1)
    log = ended_sessions(50, 3)
    reader = Reader(log, Rules(transition_episodes=10, return_target=1.0))
    with caplog.at_level(logging.WARNING):
        await reader.read(1)
    assert "the last 5 steps were read" in caplog.text
    [kept] = reader.windows().values()
    assert [one.session_id for one in kept] == [session_id(50)] * 3
    assert reader.curricula.recalled


def test_nobody_goes_up_before_all_was_recalled() -> None:
    curricula = recalled(Rules(transition_episodes=1, return_target=1.0))
    curricula.add(session_id(1), AGENT, 3, 0)
    curricula.returns.add((AGENT, 3), episode(1, 1.0))
    for known in (False, True):
        curricula.recalled = known
        assert len(list(decide_levels(curricula, lambda _: "w1-0"))) == known


# -- on servers ------------------------------------------------------------------------------------

TEN = (
    CONFIG
    + """
curriculum: {transition_episodes: 10, return_target: 2.0}
curriculum_transition_threshold: 0.9
"""
)


async def plays(world: World, one: UUID, first: int, count: int) -> None:
    """Episodes of a step each, with full success."""
    for step in range(first, first + count):
        for event in logged(one, step):
            await world.publish(event, "w1-0")


@pytest.mark.nats
@pytest.mark.postgres
async def test_a_killed_scheduler_makes_no_difference_to_when_an_agent_goes_up(
    world: World,
) -> None:
    """Nine episodes of one session that has ended and one that runs; then the leader is killed; the
    tenth episode moves the level up, as it would have."""
    leader = await asyncio.to_thread(world.start, "scheduler", TEN)
    worker = Beating(world)
    world.beats["w1"] = asyncio.create_task(worker.for_ever())
    over, runs = [(await world.request(curriculum_level=2)).session_id for _ in range(2)]
    for one in (over, runs):
        await world.placed(one)
    await plays(world, over, 0, 6)
    end = EndedFact(
        session_id=over, status="completed", code="max_steps", steps=6, episodes=6,
        inputs=b"\x80", chain=bytes(32),
    )  # fmt: skip
    await world.publish(SessionEnded(fact=end), over, session_id=over)
    await plays(world, runs, 0, 3)
    worker.one, worker.steps = runs, 3
    await world.logged(over, keys.ENDED)
    await world.logged(runs, keys.reward(2, 1))
    leader.kill()
    await asyncio.to_thread(leader.wait)
    await asyncio.to_thread(world.start, "scheduler", TEN)
    await asyncio.sleep(3)  # it leads, and nobody is moved by nine
    assert not world.events(CurriculumChanged)
    await plays(world, runs, 3, 1)
    worker.steps = 4
    assert await changes(world, runs, 1) == [(1, 3, "threshold")]
    [told] = world.events(CurriculumChanged, session_id=runs)
    assert told.circumstance.episodes == 10
    await world.logged(runs, keys.curriculum(1))
    [row] = world.sql("select cause from event_log where key = 'curriculum:1'")
    assert row["cause"] == keys.step(3)


@pytest.mark.nats
@pytest.mark.postgres
async def test_the_first_word_on_a_reward_is_what_the_agent_was_told(world: World) -> None:
    """A replica says that a reward is missing, and dies; another one has it, or the other way
    round. Whoever reads that, and when, must find the same."""
    one = (await world.request(curriculum_level=2)).session_id
    (first, reward), (second, late) = logged(one, 0), logged(one, 1)
    missing = [
        RewardMissing(
            fact=RewardNoticeFact(session_id=one, step=step, code="c", fatal=False, cause=bytes(16))
        )
        for step in range(2)
    ]
    for event in (first, second, reward, missing[1], missing[0]):
        await world.publish(event, "w1-0")
    await world.logged(one, keys.reward_missing(0))
    before = await world.history.episodes([Unread(one, 0, 1)], 1)
    assert [(list(found.rewards), found.missing) for found in before] == [([2.0], 0), ([], 1)]
    await world.publish(late, "w1-0")
    await world.logged(one, keys.reward(1, 1))
    assert await world.history.episodes([Unread(one, 0, 1)], 1) == before
