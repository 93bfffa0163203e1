"""Re-execution: a fresh machine driven through what the log has, each output compared.

The same code serves a restart, which stops at the log's tail and goes live, and verification,
which goes to the end. Every recorded output names the inputs delivered before it, so these and no
others are delivered, in that order. What the log has is never guessed: a gap in its steps is an
error, and the first output that comes out differently is named with its field.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from dsec.session import log_row
from dsec.session.anchor_record import Compared, RecordedAnchor, captured_of, with_outcome
from dsec.session.chain import chain_end, digest16
from dsec.session.io import (
    AWAITS_LATE,
    REWARD,
    TOOL_RESULT,
    Call,
    Called,
    Ended,
    Input,
    Started,
    Stepped,
    cancel_input,
    curriculum_input,
    deferred_input,
    failure_content,
    missing_input,
    result_input,
    reward_input,
)
from dsec.session.log_row import (
    RecordedGap,
    Row,
    circumstance_map,
    ended_fact,
    fact_bytes,
    fact_map,
    position,
)
from dsec.session.machine import OWN_CODES, SessionMachine
from dsec.session.stored_results import StoredResult
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.step import STEP_FIELDS

_INPUTS = STEP_FIELDS.index("inputs")
_CALLS = STEP_FIELDS.index("calls")
_ACTION = STEP_FIELDS.index("action")
_ENDED_FIELDS = ("status", "code", "steps", "episodes", "inputs", "chain")
_CAUSE_BYTES = 16
GetBlob = Callable[[str], bytes]
_HEAD_BYTES = {24: 2, 25: 3, 26: 5, 27: 9}


class RecordedInvalid(ValueError):
    """A fact of the log cannot be read. Names its key."""


@dataclass(slots=True)
class RecordedStep:
    """A step as the log has it."""

    step: int
    fact: bytes
    chain: bytes


@dataclass(slots=True)
class Recorded:
    """What the log has of one session, as a re-execution needs it.

    `reset` is canonical `[state_hash, observation_hash, info]`, None where the session never
    started; `steps` run from 0 without a gap; `inputs` are in the order of their positions, the
    first of each kind and ordinal.
    """

    reset: bytes | None = None
    chain_0: bytes | None = None
    steps: list[RecordedStep] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    ended: Ended | None = None
    turns: dict[tuple[int, int], Called] = field(default_factory=dict)
    """Tool calls by step and turn."""
    anchors: dict[int, RecordedAnchor] = field(default_factory=dict)
    """By position."""
    lanes: list[str] = field(default_factory=list)
    """Where it was placed, in order: answers to what it asked then go there."""

    @classmethod
    def from_rows(cls, rows: Iterable[Row], get_blob: GetBlob | None = None) -> Recorded:
        """Read the rows of one session, in any order and however often repeated.

        Args:
            get_blob: gives the bytes of results that lie in the object store; what it raises
                leaves this.

        Raises:
            RecordedGap: a step is missing.
            RecordedInvalid: a fact is not what its kind says.
        """
        ordered = sorted(rows, key=position)
        recorded = cls()
        steps: dict[int, RecordedStep] = {}
        inputs: dict[tuple[str, int], Input] = {}
        for row in ordered:
            if row.kind == log_row.STEPPED:
                assert row.step is not None
                if row.step not in steps:
                    fact, chain = bytes(row.fact), bytes(row.chain or b"")
                    steps[row.step] = RecordedStep(row.step, fact, chain)
                continue
            try:
                recorded._take(row, inputs, get_blob)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise RecordedInvalid(f"{row.key} cannot be read: {error!r}") from error
        recorded.steps = [steps[n] for n in sorted(steps)]
        recorded.inputs = list(inputs.values())
        recorded._take_anchors(ordered)
        for n, step in enumerate(recorded.steps):
            if step.step != n:
                raise RecordedGap(n, step.step)
        return recorded

    def _take(
        self, row: Row, inputs: dict[tuple[str, int], Input], get_blob: GetBlob | None
    ) -> None:
        if row.kind == log_row.STARTED and self.reset is None:
            fact = fact_map(row)
            self.reset, self.chain_0 = fact_bytes(fact, "reset"), fact_bytes(fact, "chain")
        elif row.kind == log_row.ENDED and self.ended is None:
            self.ended = ended_of(row)
        elif row.kind == log_row.PLACED:
            if (lane := str(fact_map(row)["lane"])) not in self.lanes:
                self.lanes.append(lane)
        elif row.kind in log_row.ANCHORS:
            pass  # taken together, since each has two rows
        elif row.kind == log_row.TOOL_CALLED:
            turn = turn_of(row)
            self.turns.setdefault((turn.step, turn.turn), turn)
        else:
            given = input_of(row, get_blob)
            if given is not None:
                inputs.setdefault((given.kind, given.ordinal), given)

    def _take_anchors(self, ordered: list[Row]) -> None:
        captured: dict[int, Row] = {}
        for row in ordered:
            if row.kind not in log_row.ANCHORS:
                continue
            try:
                if row.kind == log_row.ANCHOR_CAPTURED:
                    anchor = captured_of(row)
                    self.anchors.setdefault(anchor.position, anchor)
                    captured.setdefault(anchor.position, row)
                elif (at := int(fact_map(row)["position"])) in captured:
                    # The first outcome counts. No anchor is stored before it is captured.
                    anchor = self.anchors[at]
                    if anchor.blob is None and not anchor.lost:
                        self.anchors[at] = with_outcome(anchor, row, captured[at])
            except (ValueError, KeyError, TypeError) as error:
                raise RecordedInvalid(f"{row.key} cannot be read: {error!r}") from error

    def decision(self, step: int) -> dict[str, Any]:
        """What the agent decided at a recorded step."""
        return {"action": decode(self.steps[step].fact)[_ACTION]}


def ended_of(row: Row) -> Ended:
    """The end that a row tells of.

    Raises:
        ValueError, KeyError: the fact is not that of an end.
    """
    fact = ended_fact(row)
    return Ended(
        fact.status,
        fact.code,
        fact.steps,
        fact.episodes,
        fact.inputs,
        fact.chain,
        str(circumstance_map(row).get("message", "")),
    )


def turn_of(row: Row) -> Called:
    """The tool calls that a row tells of.

    Raises:
        ValueError, KeyError: the fact is not that of tool calls.
    """
    fact = fact_map(row)
    functions = [(one["id"], one["function"]) for one in fact["calls"]]
    calls = tuple(Call(id_, told["name"], told["arguments"]) for id_, told in functions)
    inputs, turn_hash = fact_bytes(fact, "inputs"), fact_bytes(fact, "turn_hash")
    return Called(int(fact["step"]), int(fact["turn"]), inputs, calls, turn_hash, b"")


def _result_of(row: Row, get_blob: GetBlob | None) -> Input:
    fact = fact_map(row)
    ordinal = keys.call_ordinal(fact["step"], fact["turn"], fact["index"])
    turn_hash = fact_bytes(fact, "turn_hash")
    if row.kind == log_row.TOOL_RETURNED:
        if (blob := fact.get("blob")) is not None:
            if get_blob is None:
                raise ValueError(f"its result, blob {blob}, is in an object store: name the store")
            return StoredResult(ordinal, blob, turn_hash).given(get_blob(blob))
        return result_input(ordinal, "", fact_bytes(fact, "content"), turn_hash)
    content = failure_content(fact["message"], bool(fact["retryable"]))
    return result_input(ordinal, fact["code"], content, turn_hash)


def input_of(row: Row, get_blob: GetBlob | None = None) -> Input | None:
    """The input that a row is to its session, or None. Later revisions of a reward are none.

    Raises:
        ValueError, KeyError: the fact is not what its kind says.
    """
    if row.kind == log_row.REWARD_SCORED:
        fact, step = bytes(row.fact), row.step
        assert step is not None
        if row.key != f"reward:{step}.1":
            return None
        assert row.value is not None
        return reward_input(step, row.value, fact, fact[-_CAUSE_BYTES:])
    if row.kind == log_row.REWARD_MISSING:
        notice, told = fact_map(row), circumstance_map(row)
        return missing_input(
            notice["step"],
            notice["code"],
            bool(notice.get("fatal", False)),
            str(told.get("message", "")),
            fact_bytes(notice, "cause"),
        )
    if row.kind == log_row.REWARD_DEFERRED:
        notice = fact_map(row)
        return deferred_input(notice["step"], notice["code"], fact_bytes(notice, "cause"))
    if row.kind in (log_row.TOOL_RETURNED, log_row.TOOL_FAILED):
        return _result_of(row, get_blob)
    if row.kind == log_row.CURRICULUM_CHANGED:
        change = fact_map(row)
        return curriculum_input(int(change["n"]), int(change["level"]))
    if row.kind == log_row.CANCEL_REQUESTED:
        told = circumstance_map(row)
        return cancel_input(str(told.get("code", "cancelled")), str(told.get("reason") or ""))
    return None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output that came out differently.

    `step` is None for the first reset (`reset`, `chain_0`) and for the end (`status`, `code`,
    `steps`, `episodes`, `inputs`, `chain`). `field` is one of `STEP_FIELDS` for a step, or
    `chain` or `anchor`; `status` where one side ended and the other did not; `fact` where the
    recorded bytes are no fact at all. `expected` is the log's, `actual` the re-execution's.
    """

    step: int | None
    field: str
    expected: Any
    actual: Any


class _Named:
    """Finds the inputs that outputs name. Mostly it is the next one, and no fact is decoded."""

    __slots__ = ("_by_name", "_next", "inputs", "taken")

    def __init__(self, inputs: list[Input]) -> None:
        self.inputs = inputs
        self.taken: set[int] = set()
        self._next = 0
        self._by_name: dict[tuple[str, int], int] | None = None

    def of_step(self, fact: bytes) -> list[Input]:
        """The inputs that a step names.

        Raises:
            _NotInLog: one is not there, or not with this hash.
            ValueError, TypeError, IndexError: the fact is none.
        """
        at = 1
        for _ in range(_INPUTS):  # step and episode: the items before the inputs
            at += _HEAD_BYTES.get(fact[at] & 31, 1)
        if fact[at] == 0x80:
            return []
        if self._next < len(self.inputs):
            given = self.inputs[self._next]
            if fact[at] == 0x81 and fact.startswith(given.name(), at + 1):
                self.taken.add(self._next)
                self._next += 1
                return [given]
        return self.of_names(decode(fact)[_INPUTS])

    def of_names(self, names: list[Any]) -> list[Input]:
        """The inputs of `[[kind, ordinal, hash], ...]`."""
        if self._by_name is None:
            self._by_name = {(g.kind, g.ordinal): n for n, g in enumerate(self.inputs)}
        result = []
        for kind, ordinal, digest in names:
            n = self._by_name.get((kind, ordinal))
            if n is None or digest16(self.inputs[n].fact) != digest:
                actual = None if n is None else [kind, ordinal, digest16(self.inputs[n].fact)]
                raise _NotInLog([kind, ordinal, digest], actual)
            self.taken.add(n)
            self._next = n + 1
            result.append(self.inputs[n])
        return result


class _NotInLog(Exception):
    def __init__(self, expected: list[Any], actual: list[Any] | None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.actual = actual


def rerun(machine: SessionMachine, recorded: Recorded) -> Divergence | None:
    """Drive a machine through the record and name the first difference, if there is one.

    The machine is a fresh one, or stands behind a recorded step because it was made from an anchor.

    Afterwards, if all is equal, the machine stands where the log stops: at its end, or live with
    its last output unanswered. A log without a start and without an end leaves it untouched.

    The agent of a D1 session is not asked; the recorded actions drive the environment, and the
    agent hears its rewards.
    """
    steps = rerun_steps(machine, recorded)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def rerun_steps(
    machine: SessionMachine, recorded: Recorded, anchors: Compared | None = None
) -> Generator[int, None, Divergence | None]:
    """`rerun`, step by step: yields each step before its user code runs, so that whoever drives it
    can give a long record's steps a deadline each, and do other things between them.

    Args:
        anchors: what becomes of those that are taken; by default they are only compared.
    """
    machine.on_anchor = compared = anchors or Compared(recorded.anchors, keep=False)
    if not machine.deterministic:
        machine.recorded_actions = recorded.decision
    try:
        return (yield from _rerun(machine, recorded, _Named(recorded.inputs), compared))
    finally:
        machine.recorded_actions = machine.on_anchor = None


def undelivered(recorded: Recorded, machine: SessionMachine) -> list[Input]:
    """The inputs that no output of the log names, in the order of their positions.

    They are delivered to a machine that `rerun` has brought to the tail; what is stale among them
    changes nothing. Empty once the machine has ended.
    """
    if machine.ended is not None:
        return []
    named = _Named(recorded.inputs)
    for step in recorded.steps:
        named.of_step(step.fact)
    for turn in recorded.turns.values():
        named.of_names(decode(turn.inputs))
    return [given for n, given in enumerate(recorded.inputs) if n not in named.taken]


def _rerun(
    machine: SessionMachine, recorded: Recorded, named: _Named, anchors: Compared
) -> Generator[int, None, Divergence | None]:
    if recorded.reset is None:
        if recorded.steps:
            return Divergence(None, "reset", None, "the log has steps and no start")
    elif machine.chain is None:
        divergence = _compare_start(machine.start(), recorded)
        if divergence is not None:
            return divergence
    turns = _Turns(recorded, machine.steps)
    for step in recorded.steps[machine.steps :]:
        yield step.step
        divergence = yield from _rerun_step(machine, step, named, turns)
        if divergence is None and recorded.anchors:
            divergence = _anchor_difference(machine, anchors)
        if divergence is not None:
            return divergence
    if recorded.turns:
        divergence = yield from _rerun_last_turns(machine, named, turns)
        if divergence is not None:
            return divergence
    return None if recorded.ended is None else _rerun_end(machine, recorded, named)


class _Turns:
    """The recorded tool calls beside those that come out again."""

    def __init__(self, recorded: Recorded, from_step: int) -> None:
        self._recorded = recorded.turns
        self._unseen = {at: turn for at, turn in recorded.turns.items() if at[0] >= from_step}
        self.any = bool(recorded.turns)
        self.next_step = len(recorded.steps)

    def compare(self, output: Called) -> Divergence | None:
        """A turn that came out, with what the log has of it."""
        place = output.step, output.turn
        expected = self._recorded.get(place)
        self._unseen.pop(place, None)
        if expected is None:
            # Those of the last step are published after it: the worker died in between.
            if output.step == self.next_step - 1:
                return None
            return Divergence(output.step, "calls", None, _calls(output))
        if expected.inputs != output.inputs:
            one, other = _value(expected.inputs), _value(output.inputs)
            return Divergence(output.step, "inputs", one, other)
        if expected.calls != output.calls:
            return Divergence(output.step, "calls", _calls(expected), _calls(output))
        if expected.turn_hash != output.turn_hash:
            one, other = expected.turn_hash, output.turn_hash
            return Divergence(output.step, "turn_hash", one, other)
        return None

    def before(self, step: RecordedStep) -> list[int]:
        """For each recorded turn before a step was taken, in order: how many inputs were delivered
        since the step before, when it was made.

        Raises:
            ValueError, TypeError: what a turn names are no inputs.
        """
        delivered, counts = 0, list[int]()
        turn = None
        while (following := self._recorded.get((step.step, len(counts)))) is not None:
            turn = following
            delivered += len(decode(turn.inputs))
            counts.append(delivered)
        if turn is not None and digest16(step.chain + turn.fact) == turn.turn_hash:
            counts.pop()  # it came with the action
        return counts

    def waiting(self, turn: int) -> Called | None:
        """The recorded turn of the step after the last recorded one."""
        return self._recorded.get((self.next_step, turn))

    def unseen(self) -> Divergence | None:
        """A recorded turn that did not come out."""
        for (step, _), turn in sorted(self._unseen.items()):
            return Divergence(step, "calls", _calls(turn), None)
        return None


def _calls(turn: Called) -> list[list[str]]:
    return [list(call) for call in turn.calls]


def _rerun_last_turns(
    machine: SessionMachine, named: _Named, turns: _Turns
) -> Generator[int, None, Divergence | None]:
    """The turns behind the last step: of a step that was not taken, or not recorded."""
    n = 0
    while (turn := turns.waiting(n)) is not None:
        n += 1
        try:
            for given in named.of_names(decode(turn.inputs)):
                machine.deliver(given)
        except _NotInLog as missing:
            return Divergence(turn.step, "inputs", missing.expected, missing.actual)
        except (ValueError, TypeError, IndexError):
            return Divergence(turn.step, "inputs", turn.inputs, None)
        if machine.ended is not None:
            return Divergence(turn.step, "status", "called", _told(machine.ended))
        if machine.awaiting is not None:
            return Divergence(turn.step, "inputs", _value(turn.inputs), _waits(machine))
        yield turn.step
        output = machine.step()
        if not isinstance(output, Called):
            told = _told(output) if isinstance(output, Ended) else "stepped"
            return Divergence(turn.step, "status", "called", told)
        if (divergence := turns.compare(output)) is not None:
            return divergence
    return turns.unseen()


def _anchor_difference(machine: SessionMachine, anchors: Compared) -> Divergence | None:
    """The anchor behind the step that was just taken, with what the log has there."""
    difference = anchors.difference(machine.steps)
    if difference is None:
        return None
    expected, actual = difference
    if actual is None and not machine.deterministic:
        return None  # the agent asked for it, and is not asked again
    return Divergence(machine.steps - 1, "anchor", expected, actual)


def _waits(machine: SessionMachine) -> list[list[Any]]:
    """What a machine waits for, as inputs are named but for their hashes."""
    if machine.awaiting is not None and machine.awaiting >= 0:
        return [[REWARD, machine.awaiting]]
    late = machine.late
    if machine.awaiting == AWAITS_LATE and late is not None:
        return [[REWARD, step] for step in late.rewards] + [[TOOL_RESULT, n] for n in late.results]
    turn = cast(Called, machine.called)
    first = keys.call_ordinal(turn.step, turn.turn, 0)
    return [[TOOL_RESULT, first + n] for n in range(len(turn.calls))]


def _compare_start(output: Started | Ended, recorded: Recorded) -> Divergence | None:
    if isinstance(output, Ended):
        return Divergence(None, "status", "started", _told(output))
    if output.reset != recorded.reset:
        return Divergence(None, "reset", _value(recorded.reset or b""), _value(output.reset))
    if output.chain != recorded.chain_0:
        return Divergence(None, "chain_0", recorded.chain_0, output.chain)
    return None


def _rerun_step(
    machine: SessionMachine, step: RecordedStep, named: _Named, turns: _Turns
) -> Generator[int, None, Divergence | None]:
    try:
        divergence = yield from _deliver(machine, step, named.of_step(step.fact), turns)
        if divergence is not None:
            return divergence
        if machine.recorded_actions is not None:
            decode(step.fact)[_ACTION]
    except _NotInLog as missing:
        return Divergence(step.step, "inputs", missing.expected, missing.actual)
    except (ValueError, TypeError, IndexError):
        value = _value(step.fact)
        if isinstance(value, list) and len(value) == len(STEP_FIELDS):
            return Divergence(step.step, "inputs", value[_INPUTS], None)
        return Divergence(step.step, "fact", step.fact, None)
    if machine.ended is not None:
        return Divergence(step.step, "status", "stepped", _told(machine.ended))
    if machine.awaiting is not None:
        return Divergence(step.step, "inputs", decode(step.fact)[_INPUTS], _waits(machine))
    output = machine.step()
    if isinstance(output, Ended):
        return Divergence(step.step, "status", "stepped", _told(output))
    if isinstance(output, Called):
        return Divergence(step.step, "calls", decode(step.fact)[_CALLS], _calls(output))
    if output.fact != step.fact:
        return _first_difference(step, output)
    if output.chain != step.chain:
        return Divergence(step.step, "chain", step.chain, output.chain)
    return None if output.called is None else turns.compare(output.called)


def _deliver(
    machine: SessionMachine, step: RecordedStep, inputs: list[Input], turns: _Turns
) -> Generator[int, None, Divergence | None]:
    """Deliver what a step names, and make the turns between: each where the log has it."""
    counts = turns.before(step) if turns.any else []
    made = 0
    for n in range(len(inputs) + 1):
        given = inputs[n] if n < len(inputs) else None
        while machine.awaiting is None and machine.ended is None:
            is_due = made < len(counts) and counts[made] == n
            # Without its turn in the log, a result still says that the agent asked for it.
            if not is_due and (given is None or not _is_asked_for(machine, given)):
                break
            divergence = _compare_turn(machine.step(), step, turns)
            if divergence is not None:
                return divergence
            made += 1
            yield step.step
        if given is not None:
            machine.deliver(given)
    return None


def _is_asked_for(machine: SessionMachine, given: Input) -> bool:
    """Whether an input answers a tool call that the agent has yet to make."""
    late = machine.late
    return given.kind == TOOL_RESULT and (late is None or given.ordinal not in late.results)


def _compare_turn(
    output: Stepped | Called | Ended, step: RecordedStep, turns: _Turns
) -> Divergence | None:
    """A turn that a recorded step needs, with what came out."""
    if isinstance(output, Called):
        return turns.compare(output)
    if isinstance(output, Ended):
        return Divergence(step.step, "status", "called", _told(output))
    return _first_difference(step, output)


def _first_difference(step: RecordedStep, output: Stepped) -> Divergence:
    expected, actual = _value(step.fact), _value(output.fact)
    if isinstance(expected, list) and len(expected) == len(STEP_FIELDS):
        for name, one, other in zip(STEP_FIELDS, expected, actual, strict=True):
            if encode(one) != encode(other):
                return Divergence(step.step, name, one, other)
    return Divergence(step.step, "fact", step.fact, output.fact)


def _rerun_end(machine: SessionMachine, recorded: Recorded, named: _Named) -> Divergence | None:
    ended = cast(Ended, recorded.ended)
    if ended.steps > len(recorded.steps):
        raise RecordedGap(len(recorded.steps))
    own = ended.status == "failed" and ended.code in OWN_CODES
    if recorded.reset is None and own:
        machine.start()
    try:
        for given in named.of_names(decode(ended.inputs)):
            machine.deliver(given)
    except _NotInLog as missing:
        return Divergence(None, "inputs", missing.expected, missing.actual)
    except (ValueError, TypeError, IndexError):
        return Divergence(None, "inputs", ended.inputs, None)
    # The decision that a D1 session failed with is not in the log, so that cannot happen again.
    waits = machine.chain is None or machine.awaiting is not None
    if machine.ended is None and own and machine.deterministic and not waits:
        machine.step()
    return _compare_end(machine, ended)


def _compare_end(machine: SessionMachine, ended: Ended) -> Divergence | None:
    actual = machine.ended
    if actual is None:
        unexplained = ended.status == "completed" or (
            ended.status == "failed" and ended.code in OWN_CODES and machine.deterministic
        )
        if unexplained:
            return Divergence(None, "status", ended.status, "not ended")
        # It was ended from outside: crashed, out of memory, cancelled before it began. What is
        # left to check is that the end closes this log.
        steps, episodes = machine.steps, machine.episodes
        status, code, inputs = ended.status, ended.code, ended.inputs
        chain = chain_end(machine.chain, status, code, steps, episodes, inputs)
        actual = Ended(status, code, steps, episodes, inputs, chain)
    for name in _ENDED_FIELDS:
        expected, got = getattr(ended, name), getattr(actual, name)
        if expected != got:
            if name == "inputs":
                expected, got = _value(expected), _value(got)
            return Divergence(None, name, expected, got)
    return None


def _value(data: bytes) -> Any:
    try:
        return decode(data)
    except CanonicalError:
        return data


def _told(ended: Ended) -> str:
    return f"{ended.status}: {ended.code}: {ended.message}".removesuffix(": ")
