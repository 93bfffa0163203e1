"""The recorded tool calls of a session, beside those that come out again."""

from __future__ import annotations

from dsec.session.chain import digest16
from dsec.session.divergence import Divergence, calls_told, decoded
from dsec.session.io import Called
from dsec.session.recorded import Recorded, RecordedStep
from dsec_contracts.canonical import decode


class RecordedTurns:
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
            return Divergence(output.step, "calls", None, calls_told(output))
        if expected.inputs != output.inputs:
            one, other = decoded(expected.inputs), decoded(output.inputs)
            return Divergence(output.step, "inputs", one, other)
        if expected.calls != output.calls:
            return Divergence(output.step, "calls", calls_told(expected), calls_told(output))
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
            return Divergence(step, "calls", calls_told(turn), None)
        return None
