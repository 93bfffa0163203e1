"""The fold: from the log of a session to its state. Runs no user code.

It is pure and total, works on sessions whose code is long gone, and depends on what the rows say
alone: their order and repetition change nothing. A step is not decoded, since typed columns hold
what a state needs; its bytes are hashed, so that the recorded chain is checked on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from dsec.session import log_row
from dsec.session.chain import chain_end, chain_start
from dsec.session.io import REWARD, REWARD_MISSING
from dsec.session.log_row import EndedFact, RecordedGap, Row, ended_fact, fact_bytes, fact_map
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, decode
from dsec_contracts.step import STEP_FIELDS

_INPUTS = STEP_FIELDS.index("inputs")
Status = Literal["queued", "running", "completed", "failed", "cancelled"]


class StepNotRecorded(LookupError):
    """The log does not have the step that was asked for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first place where the recorded chain is not the hash of the recorded facts.

    `step` is None for the start (`started`, `chain_0`) and the end (`ended`, `steps`, `episodes`,
    `chain`).
    """

    step: int | None
    field: str


@dataclass(slots=True)
class EpisodeState:
    """One episode. `reward` sums the newest rewards of its steps, in the order of the steps."""

    episode: int
    steps: int = 0
    reward: float = 0.0
    rewarded: int = 0
    missing: int = 0
    terminated: bool = False
    truncated: bool = False

    @property
    def finished(self) -> bool:
        """Whether the environment ended it."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class DeferredReward:
    """A reward that came later than its step.

    `delivered_before` is the step before which the agent was told, or that there is none; after the
    last one it is the number of steps. None: it was not told yet, or never.
    """

    step: int
    code: str
    delivered_before: int | None


@dataclass(slots=True)
class SessionState:
    """What the log says of a session.

    `steps` counts environment steps, `episodes` finished ones. `reward_total` is the sum of the
    newest rewards in the order of the steps, None while none has come; a missing reward is counted
    in `rewards_missing`, unless a later revision brought it, and never taken for 0. `deferred` are
    the steps whose rewards were deferred, with when they were delivered. `chain` is the
    last recorded hash; `fault` tells where it is not the hash of the facts. `observation` is what
    the environment showed last, None where it was not recorded.
    """

    status: Status = "queued"
    code: str | None = None
    steps: int = 0
    episodes: int = 0
    attempts: int = 0
    reward_total: float | None = None
    rewards: int = 0
    rewards_missing: int = 0
    chain: bytes | None = None
    fault: Fault | None = None
    observation: bytes | None = None
    ended: EndedFact | None = None
    by_episode: list[EpisodeState] = field(default_factory=list)
    deferred: list[DeferredReward] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether every recorded hash is that of the recorded facts."""
        return self.fault is None

    @property
    def chain_hash(self) -> str | None:
        """The last hash in hexadecimal."""
        return None if self.chain is None else self.chain.hex()

    @property
    def returns(self) -> list[float]:
        """The sum of rewards of each episode, the unfinished last one included."""
        return [episode.reward for episode in self.by_episode]


def fold(rows: Iterable[Row]) -> SessionState:
    """The state after all of a session's rows.

    Raises:
        RecordedGap: a step is missing before one that is there, or before the end.
    """
    return _Fold(rows).state(None)


def fold_at(rows: Iterable[Row], step: int) -> SessionState:
    """The state right after a step, with the rewards of the steps up to it.

    A reward comes after its step, so at the very moment the last one had not come; who asks for
    the state at a step wants it all the same, and its newest revision.

    Raises:
        StepNotRecorded: the log does not have the step.
        RecordedGap: a step before it is missing.
    """
    return _Fold(rows).state(step)


class _Fold:
    """The rows of one session, sorted out by kind. Of two rows of one key the lower one counts."""

    __slots__ = ("cold", "deferred", "missing", "rewards", "steps")

    def __init__(self, rows: Iterable[Row]) -> None:
        self.steps: dict[int, Row] = {}
        self.rewards: dict[int, Row] = {}
        self.missing: set[int] = set()
        self.deferred: dict[int, Row] = {}
        self.cold: dict[str, Row] = {}
        steps, rewards = self.steps, self.rewards
        for row in rows:
            kind = row.kind
            if kind == log_row.STEPPED:
                known = steps.setdefault(row.step, row)  # type: ignore[arg-type]
                if known is not row and _before(row, known):
                    steps[row.step] = row  # type: ignore[index]
            elif kind == log_row.REWARD_SCORED:
                known = rewards.setdefault(row.step, row)  # type: ignore[arg-type]
                if known is not row:
                    self._newer_reward(known, row)
            elif kind == log_row.REWARD_MISSING:
                self.missing.add(row.step)  # type: ignore[arg-type]
            elif kind == log_row.REWARD_DEFERRED:
                known = self.deferred.setdefault(row.step, row)  # type: ignore[arg-type]
                if known is not row and _before(row, known):
                    self.deferred[row.step] = row  # type: ignore[index]
            else:
                known = self.cold.setdefault(row.key, row)
                if known is not row and _before(row, known):
                    self.cold[row.key] = row

    def _newer_reward(self, known: Row, row: Row) -> None:
        old, new = _revision(known.key), _revision(row.key)
        if new > old or (new == old and _before(row, known)):
            self.rewards[row.step] = row  # type: ignore[index]

    def state(self, until: int | None) -> SessionState:
        last = max(self.steps, default=-1)
        if until is not None:
            if until not in self.steps:
                raise StepNotRecorded(f"step {until} is not in the log; its last one is {last}")
            last = until
        state = SessionState()
        self._start(state)
        self._walk(state, last)
        tail = None if until is None else self.steps[until]
        for row in self.cold.values():
            if row.kind == log_row.PLACED and (tail is None or _before(row, tail)):
                state.attempts = max(state.attempts, row.attempt or 0)
        if state.attempts or state.steps:
            state.status = "running"
        if until is None and (row_of_end := self.cold.get(keys.ENDED)) is not None:
            _end(state, row_of_end)
        if self.deferred:
            self._deferred(state)
        return state

    def _deferred(self, state: SessionState) -> None:
        """Deferred rewards, and which output names them. Only for these a step is decoded."""
        told: dict[int, int] = {}
        for n in range(state.steps):
            _note(told, n, _inputs_of(self.steps[n].fact))
        if state.ended is not None:
            _note(told, state.steps, _decoded(state.ended.inputs))
        for step in sorted(self.deferred):
            if step < state.steps:
                code = _code(self.deferred[step])
                state.deferred.append(DeferredReward(step, code, told.get(step)))

    def _start(self, state: SessionState) -> None:
        row = self.cold.get(keys.STARTED)
        if row is None:
            if self.steps:
                state.fault = Fault(None, "started")
            return
        state.status, state.chain = "running", _bytes(row.chain)
        state.observation = _bytes(row.observation)
        try:
            fact = fact_map(row)
            chain = chain_start(fact_bytes(fact, "reset"))
            intact = chain == fact_bytes(fact, "chain") == state.chain
        except (ValueError, TypeError):
            intact = False
        if not intact:
            state.fault = Fault(None, "chain_0")

    def _walk(self, state: SessionState, last: int) -> None:
        """Steps 0 to `last`: chain, episodes, rewards."""
        steps, rewards, missing, hashed = self.steps, self.rewards, self.missing, sha256
        chain, total, episode = state.chain or b"", 0.0, EpisodeState(-1)
        bad, row = None, None
        for n in range(last + 1):
            row = steps.get(n)
            if row is None:
                raise RecordedGap(n, min(k for k in steps if k > n))
            recorded = row.chain
            if hashed(chain + row.fact).digest() != recorded and bad is None:
                bad = n
            chain = recorded or b""
            if row.episode != episode.episode:
                episode = EpisodeState(row.episode or 0)
                state.by_episode.append(episode)
            episode.steps += 1
            reward = rewards.get(n)
            if reward is not None:
                value: Any = reward.value
                total += value
                episode.reward += value
                episode.rewarded += 1
            elif n in missing:
                episode.missing += 1
            if row.terminated or row.truncated:
                state.episodes += 1
                episode.terminated, episode.truncated = bool(row.terminated), bool(row.truncated)
        if row is None:
            return
        state.steps, state.chain = last + 1, _bytes(chain)
        state.observation = _bytes(row.observation)
        state.rewards = sum(one.rewarded for one in state.by_episode)
        state.rewards_missing = sum(one.missing for one in state.by_episode)
        state.reward_total = total if state.rewards else None
        if state.fault is None and bad is not None:
            state.fault = Fault(bad, "chain")


def _end(state: SessionState, row: Row) -> None:
    try:
        fact = ended_fact(row)
        chain = chain_end(
            state.chain, fact.status, fact.code, fact.steps, fact.episodes, fact.inputs
        )
    except (ValueError, KeyError, TypeError):
        state.fault = state.fault or Fault(None, "ended")
        return
    if fact.steps > state.steps:
        raise RecordedGap(state.steps)
    if state.fault is None:
        if fact.steps != state.steps:
            state.fault = Fault(None, "steps")
        elif fact.episodes != state.episodes:
            state.fault = Fault(None, "episodes")
        elif not (chain == fact.chain == _bytes(row.chain)):
            state.fault = Fault(None, "chain")
    state.status, state.code, state.ended, state.chain = fact.status, fact.code, fact, fact.chain


def _note(told: dict[int, int], before: int, names: Any) -> None:
    """Note which rewards an output names."""
    for name in names if isinstance(names, list) else ():
        if isinstance(name, list) and len(name) == 3 and name[0] in (REWARD, REWARD_MISSING):
            told.setdefault(name[1], before)


def _inputs_of(fact: bytes) -> Any:
    value = _decoded(bytes(fact))
    return value[_INPUTS] if isinstance(value, list) and len(value) > _INPUTS else None


def _decoded(data: bytes) -> Any:
    try:
        return decode(data)
    except CanonicalError:
        return None  # a fold is total: whoever verifies says what is wrong with it


def _code(row: Row) -> str:
    try:
        return str(fact_map(row).get("code", ""))
    except ValueError:
        return ""


def _revision(key: str) -> int:
    return int(key.rpartition(".")[2])


def _before(row: Row, other: Row) -> bool:
    return log_row.position(row) < log_row.position(other)


def _bytes(value: bytes | None) -> bytes | None:
    return None if value is None else bytes(value)
