"""Verification: a session's code is run again under its recorded inputs, and its rewards computed
anew from its recorded transitions. The verdict names the first difference.

A reward that is recorded as missing has nothing to be equal to. Whether that is a fault depends on
why it is missing: where the function itself failed (`reward_raised`, `reward_invalid`, ...), it
must fail again, and a value now means that it is not a function of the transition. Where the
circumstances failed (a deadline, a process that died, a service that was away), a value now says
nothing, and the step is left out of the comparison. A step that neither has a reward nor a notice
was not answered when the session ended; if it should have been, re-execution finds that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dsec.platform.copies import ending_copies
from dsec.platform.object_errors import BlobDamaged, BlobNotFound
from dsec.replay.record import record_difference
from dsec.reward.score import Asks, RewardError, Scorer, reward_fact
from dsec.session import log_row
from dsec.session.divergence import Divergence
from dsec.session.interposition import Interposition
from dsec.session.io import SessionConfig
from dsec.session.log_row import RecordedGap, Row, fact_map, observation_behind, position
from dsec.session.machine import SessionMachine
from dsec.session.observations import resolve
from dsec.session.program import Determinism, Program
from dsec.session.recorded import Recorded, RecordedInvalid
from dsec.session.rerun import rerun_steps
from dsec.session.whole_episode import EpisodeStep, pack_episode
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.reward import CAUSE_BYTES
from dsec_contracts.session import RequestFact
from dsec_contracts.step import STEP_FIELDS

REPRODUCIBLE = frozenset(("reward_raised", "reward_invalid", "reward_load_failed"))
"""Codes of missing rewards that come from the function and must come again."""

_COLUMNS = (
    ("episode", "episode"),
    ("value", "env_reward"),
    ("terminated", "terminated"),
    ("truncated", "truncated"),
)
"""The typed columns of a step, each with the field of the fact that it repeats."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found.

    `ok`: every output came out the same, the rewards too, and the columns that queries and folds
    read say what the facts say. `reward_ok`: all rewards that can be computed anew are equal; None
    where there was no scorer. `complete`: the session has an end, and that was verified as well.
    `determinism`: how much of it was executed again. Of a D0 session nothing was: its record is
    whole, and its rewards are those of its recorded transitions.
    """

    steps: int
    first_divergence: Divergence | None
    reward_ok: bool | None
    rewards_compared: int
    complete: bool
    determinism: Determinism = "D2"

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.first_divergence is None


def rscr(verdicts: Iterable[Verdict]) -> float | None:
    """The share of sessions whose rewards, computed anew, equal the recorded ones at every step.

    None where none was computed.
    """
    known = [verdict.reward_ok for verdict in verdicts if verdict.reward_ok is not None]
    return sum(known) / len(known) if known else None


def request_of(rows: Iterable[Row]) -> RequestFact | None:
    """What was asked for, from the rows of a session."""
    for row in rows:
        if row.kind == log_row.REQUESTED:
            return RequestFact.model_validate_json(json.dumps(fact_map(row)))
    return None


def verify(
    rows: Iterable[Row],
    program: Program,
    config: SessionConfig,
    scorer: Scorer | None,
    *,
    interposition: Interposition | None = None,
    get_blob: Callable[[str], bytes] | None = None,
) -> Verdict:
    """Re-execute a session and score it again. Runs user code.

    What cannot be executed again (D0) is not: see `dsec.replay.record`.

    A log that is still growing, or was cut off, is verified as far as it goes.

    Args:
        scorer: of the session's reward spec; None leaves the rewards alone.
        get_blob: gives the bytes of observations and of tools' results that lie in the object
            store; without it a reward that needs one counts as unequal.
    """
    ordered = sorted(rows, key=position)
    try:
        recorded = Recorded.from_rows(ordered, get_blob)
        if program.determinism == "D0":
            divergence = record_difference(recorded)
        else:
            divergence = _rerun(SessionMachine(program, config, interposition), recorded)
    except RecordedGap as gap:
        return Verdict(0, Divergence(gap.step, "recorded", True, False), None, 0, False)
    except (RecordedInvalid, BlobNotFound, BlobDamaged) as invalid:
        return Verdict(0, Divergence(None, "fact", str(invalid), None), None, 0, False)
    columns = _columns(ordered)
    rewards = _Rewards(ordered, get_blob)
    if scorer is not None:
        rewards.compare(scorer)
    found = [d for d in (divergence, columns, rewards.divergence) if d is not None]
    return Verdict(
        len(recorded.steps),
        min(found, key=_place, default=None),
        None if scorer is None else rewards.divergence is None,
        rewards.compared,
        recorded.ended is not None,
        program.determinism,
    )


def _rerun(machine: SessionMachine, recorded: Recorded) -> Divergence | None:
    """Re-execute step by step: a copy of this process that user code makes ends where it comes
    back, before it runs the next step, which might make copies too."""
    steps = rerun_steps(machine, recorded)
    try:
        while True:
            with ending_copies():
                next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        with ending_copies():
            machine.close()


def _place(divergence: Divergence) -> float:
    """The start comes first and the end last."""
    if divergence.step is not None:
        return divergence.step
    return -1 if divergence.field in ("reset", "chain_0", "fact") else float("inf")


def _columns(rows: list[Row]) -> Divergence | None:
    """The first typed column of a step that does not say what its fact says."""
    seen: set[str] = set()
    for row in rows:
        if row.kind != log_row.STEPPED or row.key in seen:
            continue
        seen.add(row.key)
        try:
            fact = dict(zip(STEP_FIELDS, decode(bytes(row.fact)), strict=True))
        except (CanonicalError, TypeError, ValueError):
            continue  # the re-execution names it
        for column, name in _COLUMNS:
            given = getattr(row, column)
            if encode(given) != encode(fact[name]):
                return Divergence(row.step, f"column {column}", given, fact[name])
    return None


@dataclass(slots=True)
class _Rewards:
    """The recorded rewards of a session beside what its function says now."""

    rows: list[Row]
    get_blob: Callable[[str], bytes] | None
    divergence: Divergence | None = None
    compared: int = 0
    _steps: dict[int, Row] = field(default_factory=dict)

    def compare(self, scorer: Scorer) -> None:
        """Find the first reward that differs."""
        scored: dict[int, Row] = {}
        missing: dict[int, Row] = {}
        first = b""
        for row in self.rows:
            step = row.step
            if row.kind == log_row.STARTED:
                first = first or bytes(row.observation or b"")
            elif step is None:
                continue
            elif row.kind == log_row.STEPPED:
                self._steps.setdefault(step, row)
            elif row.kind == log_row.REWARD_SCORED and row.key == keys.reward(step):
                scored.setdefault(step, row)
            elif row.kind == log_row.REWARD_MISSING:
                missing.setdefault(step, row)
        for step in sorted(scored.keys() | missing.keys()):
            row = self._steps.get(step)  # type: ignore[assignment]
            if row is None:
                self.divergence = Divergence(step, "reward", "a reward", "no such step")
            elif step in scored:
                self._compare_scored(scorer, row, scored[step], first)
            else:
                self._compare_missing(scorer, row, missing[step], first)
            if self.divergence is not None:
                return

    def _score(
        self, scorer: Scorer, row: Row, first: bytes, responses: bytes | None
    ) -> tuple[float, bytes]:
        """Value and fact of a step's reward, from what services answered when it was scored.

        Raises:
            RewardError: it has none.
        """
        step = row.step or 0
        answers = self._recorded(responses, "what services answered")
        if scorer.per_episode:
            score = scorer.score(self._episode(row, first), b"", b"", answers)
        elif scorer.needs_prior:
            score = scorer.score(*self._given(row, first), answers)
        else:
            score = scorer.score(bytes(row.fact), b"", b"", answers)
        cause = bytes(row.chain or b"")[:CAUSE_BYTES]
        return score.value, reward_fact(step, 1, score.value, score.components, cause)

    def _given(self, row: Row, first: bytes) -> EpisodeStep:
        step = row.step or 0
        before = self._steps.get(step - 1)
        prior = first if step == 0 or before is None else observation_behind(before)
        return EpisodeStep(bytes(row.fact), self._recorded(prior), self._recorded(row.observation))

    def _episode(self, row: Row, first: bytes) -> bytes:
        """The episode that a step closes, packed."""
        last = row.step or 0
        following = self._steps.get(last + 1)
        if following is not None and following.episode == row.episode:
            raise RewardError("step_malformed", "the episode goes on behind this step")
        begin = last
        while (before := self._steps.get(begin - 1)) and before.episode == row.episode:
            begin -= 1
        return pack_episode(self._given(self._steps[n], first) for n in range(begin, last + 1))

    def _recorded(self, recorded: bytes | None, what: str = "an observation") -> bytes:
        data = bytes(recorded or b"")
        if self.get_blob is None:
            return data
        try:
            return resolve(data, self.get_blob)
        except Exception as error:  # whatever a store raises, the other steps can be compared
            raise RewardError("step_malformed", f"{what} is lost: {error}") from error

    def _compare_scored(self, scorer: Scorer, row: Row, reward: Row, first: bytes) -> None:
        step, recorded = row.step, bytes(reward.fact)
        self.compared += 1
        try:
            value, fact = self._score(scorer, row, first, reward.extras)
        except RewardError as error:
            self.divergence = Divergence(step, "reward", reward.value, f"none: {error}")
            return
        if fact != recorded:
            self.divergence = _differing_reward(step, recorded, fact)
        elif encode(reward.value) != encode(value):
            self.divergence = Divergence(step, "column value of the reward", reward.value, value)

    def _compare_missing(self, scorer: Scorer, row: Row, notice: Row, first: bytes) -> None:
        code = fact_map(notice).get("code")
        if code not in REPRODUCIBLE:
            return
        self.compared += 1
        try:
            value, _ = self._score(scorer, row, first, notice.extras)
        except Asks:
            # Of an earlier version, which did not record what services answered before it.
            self.compared -= 1
            return
        except RewardError as error:
            if error.code != code:
                self.divergence = Divergence(row.step, "reward", f"none: {code}", str(error))
            return
        self.divergence = Divergence(row.step, "reward", f"none: {code}", value)


def _differing_reward(step: int | None, recorded: bytes, fact: bytes) -> Divergence:
    """Which part of a reward differs: its value, its components, or what it says it is for."""
    actual = decode(fact)
    try:
        expected = decode(recorded)
        named = {
            "reward": (expected[2], actual[2]),
            "reward components": (expected[3], actual[3]),
            "reward cause": (expected[4], actual[4]),
        }
    except (CanonicalError, TypeError, IndexError):
        return Divergence(step, "reward", recorded, fact)
    for name, (one, other) in named.items():
        if encode(one) != encode(other):
            return Divergence(step, name, one, other)
    return Divergence(step, "reward", recorded, fact)
