"""Re-execution: a fresh machine driven through what the log has, each output compared.

The same code serves a restart, which stops at the log's tail and goes live, and verification,
which goes to the end. Every recorded output names the inputs delivered before it, so these and no
others are delivered, in that order. What the log has is never guessed: a gap in its steps is an
error, and the first output that comes out differently is named with its field.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, cast

from dsec.session.anchor_record import Compared
from dsec.session.chain import chain_end
from dsec.session.divergence import (
    Divergence,
    calls_told,
    compare_start,
    decoded,
    end_difference,
    end_told,
    first_difference,
)
from dsec.session.io import (
    AWAITS_LATE,
    REWARD,
    TOOL_RESULT,
    Called,
    Ended,
    Input,
    Stepped,
)
from dsec.session.log_row import RecordedGap
from dsec.session.machine import SessionMachine
from dsec.session.named_inputs import NamedInputs, NotInLog
from dsec.session.recorded import Recorded, RecordedStep
from dsec.session.recorded_turns import RecordedTurns
from dsec.session.stops import FORMERLY, OWN_CODES
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

_INPUTS = STEP_FIELDS.index("inputs")
_CALLS = STEP_FIELDS.index("calls")
_ACTION = STEP_FIELDS.index("action")


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
        return (yield from _rerun(machine, recorded, NamedInputs(recorded.inputs), compared))
    finally:
        machine.recorded_actions = machine.on_anchor = None


def undelivered(recorded: Recorded, machine: SessionMachine) -> list[Input]:
    """The inputs that no output of the log names, in the order of their positions.

    They are delivered to a machine that `rerun` has brought to the tail; what is stale among them
    changes nothing. Empty once the machine has ended.
    """
    if machine.ended is not None:
        return []
    named = NamedInputs(recorded.inputs)
    for step in recorded.steps:
        named.of_step(step.fact)
    for turn in recorded.turns.values():
        named.of_names(decode(turn.inputs))
    return [given for n, given in enumerate(recorded.inputs) if n not in named.taken]


def _rerun(
    machine: SessionMachine, recorded: Recorded, named: NamedInputs, anchors: Compared
) -> Generator[int, None, Divergence | None]:
    if recorded.reset is None:
        if recorded.steps:
            return Divergence(None, "reset", None, "the log has steps and no start")
    elif machine.chain is None:
        divergence = compare_start(machine.start(), recorded)
        if divergence is not None:
            return divergence
    turns = RecordedTurns(recorded, machine.steps)
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


def _rerun_step(
    machine: SessionMachine, step: RecordedStep, named: NamedInputs, turns: RecordedTurns
) -> Generator[int, None, Divergence | None]:
    try:
        divergence = yield from _deliver(machine, step, named.of_step(step.fact), turns)
        if divergence is not None:
            return divergence
        if machine.recorded_actions is not None:
            decode(step.fact)[_ACTION]
    except NotInLog as missing:
        return Divergence(step.step, "inputs", missing.expected, missing.actual)
    except (ValueError, TypeError, IndexError):
        value = decoded(step.fact)
        if isinstance(value, list) and len(value) == len(STEP_FIELDS):
            return Divergence(step.step, "inputs", value[_INPUTS], None)
        return Divergence(step.step, "fact", step.fact, None)
    if machine.ended is not None:
        return Divergence(step.step, "status", "stepped", end_told(machine.ended))
    if machine.awaiting is not None:
        return Divergence(step.step, "inputs", decode(step.fact)[_INPUTS], _waits(machine))
    output = machine.step()
    if isinstance(output, Ended):
        return Divergence(step.step, "status", "stepped", end_told(output))
    if isinstance(output, Called):
        return Divergence(step.step, "calls", decode(step.fact)[_CALLS], calls_told(output))
    if output.fact != step.fact:
        return first_difference(step, output)
    if output.chain != step.chain:
        return Divergence(step.step, "chain", step.chain, output.chain)
    return None if output.called is None else turns.compare(output.called)


def _deliver(
    machine: SessionMachine, step: RecordedStep, inputs: list[Input], turns: RecordedTurns
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
    output: Stepped | Called | Ended, step: RecordedStep, turns: RecordedTurns
) -> Divergence | None:
    """A turn that a recorded step needs, with what came out."""
    if isinstance(output, Called):
        return turns.compare(output)
    if isinstance(output, Ended):
        return Divergence(step.step, "status", "called", end_told(output))
    return first_difference(step, output)


def _rerun_last_turns(
    machine: SessionMachine, named: NamedInputs, turns: RecordedTurns
) -> Generator[int, None, Divergence | None]:
    """The turns behind the last step: of a step that was not taken, or not recorded."""
    n = 0
    while (turn := turns.waiting(n)) is not None:
        n += 1
        try:
            for given in named.of_names(decode(turn.inputs)):
                machine.deliver(given)
        except NotInLog as missing:
            return Divergence(turn.step, "inputs", missing.expected, missing.actual)
        except (ValueError, TypeError, IndexError):
            return Divergence(turn.step, "inputs", turn.inputs, None)
        if machine.ended is not None:
            return Divergence(turn.step, "status", "called", end_told(machine.ended))
        if machine.awaiting is not None:
            return Divergence(turn.step, "inputs", decoded(turn.inputs), _waits(machine))
        yield turn.step
        output = machine.step()
        if not isinstance(output, Called):
            told = end_told(output) if isinstance(output, Ended) else "stepped"
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


def _rerun_end(
    machine: SessionMachine, recorded: Recorded, named: NamedInputs
) -> Divergence | None:
    ended = cast(Ended, recorded.ended)
    if ended.steps > len(recorded.steps):
        raise RecordedGap(len(recorded.steps))
    own = ended.status == "failed" and ended.code in OWN_CODES
    if recorded.reset is None and own:
        machine.start()
    try:
        for given in named.of_names(decode(ended.inputs)):
            machine.deliver(given)
    except NotInLog as missing:
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
    elif FORMERLY.get(actual.code) == ended.code:
        steps, episodes, inputs = actual.steps, actual.episodes, actual.inputs
        chain = chain_end(machine.chain, actual.status, ended.code, steps, episodes, inputs)
        actual = replace(actual, code=ended.code, chain=chain)
    return end_difference(ended, actual)
