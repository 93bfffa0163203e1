"""Ends that the worker gives sessions, beside those that their own machines come to.

A session that diverged after a restart, whose log is damaged, or of whose last output nobody can be
told, is over. What was published counts, so each end closes the log as it stands.
"""

from __future__ import annotations

from dsec.env_runtime.seats import Seat
from dsec.session.chain import chain_end
from dsec.session.divergence import Divergence
from dsec.session.io import Ended
from dsec.session.recorded import Recorded
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

UNPUBLISHABLE = "row_too_large"
"""The code of a session whose start or step fits no message of the server."""
_DONE = slice(STEP_FIELDS.index("terminated"), STEP_FIELDS.index("truncated") + 1)


def diverged(divergence: Divergence, recorded: Recorded) -> Ended:
    """The end of a session whose re-execution gave something else than the log has."""
    return closing("diverged_on_restart", told_of(divergence), recorded)


def told_of(divergence: Divergence) -> str:
    """A divergence, for people."""
    return (
        f"re-execution after a restart differs from the log at step {divergence.step}, field "
        f"{divergence.field}: expected {divergence.expected!r}, got {divergence.actual!r}"
    )


def closing(code: str, message: str, recorded: Recorded | None) -> Ended:
    """A failure that closes the log as it stands: what the log has was published and counts."""
    recorded = recorded or Recorded()
    steps = len(recorded.steps)
    chain = recorded.steps[-1].chain if steps else recorded.chain_0
    episodes = sum(any(decode(step.fact)[_DONE]) for step in recorded.steps)
    inputs = encode([])
    end = chain_end(chain, "failed", code, steps, episodes, inputs)
    return Ended("failed", code, steps, episodes, inputs, end, message)


def unpublishable(seat: Seat, message: str) -> Ended:
    """The end of a session whose last step cannot be published, and so did not happen."""
    last, machine = seat.last, seat.machine
    assert last is not None
    steps, episodes = last.step, machine.episodes - (last.terminated or last.truncated)
    inputs = encode([])
    chain = chain_end(seat.chain_before, "failed", UNPUBLISHABLE, steps, episodes, inputs)
    return Ended("failed", UNPUBLISHABLE, steps, episodes, inputs, chain, message)


def uncallable(seat: Seat, message: str) -> Ended:
    """The end of a session whose tool calls cannot be published. The steps before them count."""
    return cut_short(seat, UNPUBLISHABLE, message)


def cut_short(seat: Seat, code: str, message: str) -> Ended:
    """The end of a session that cannot go on from where it stands. Its steps count."""
    machine, inputs = seat.machine, encode([])
    steps, episodes = machine.steps, machine.episodes
    chain = chain_end(machine.chain, "failed", code, steps, episodes, inputs)
    return Ended("failed", code, steps, episodes, inputs, chain, message)
