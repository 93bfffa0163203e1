"""A session in one process whose answers come late, and in an order that is drawn.

What `local.run_in_memory` answers at once is answered here at any time: rewards may be deferred
first, and several steps and tool calls wait for theirs together. Tests run sessions so that must
come to the same end, or at least verify, however late the world is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from uuid import UUID

from dsec.session.io import Called, Input, SessionConfig, Started, Stepped, deferred_input
from dsec.session.local import Anchors, CallTool, Rewards, ScorerLike, no_tools
from dsec.session.log_row import LogRow
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import MemoryLog
from dsec.session.program import Program
from dsec_contracts.reward import CAUSE_BYTES

DEFERRED_CODE = "service_slow"
CHANGED_SHARE = 0.1
"""Of what happens while there are levels to give."""


def run_shuffled(
    program: Program,
    config: SessionConfig,
    session_id: UUID,
    scorer: ScorerLike,
    chance: random.Random,
    *,
    deferred_share: float = 0.5,
    call_tool: CallTool = no_tools,
    blobs: MutableMapping[str, bytes] | None = None,
    levels: Sequence[int] = (),
) -> list[LogRow]:
    """Run a session and give the rows of its log.

    Args:
        chance: draws what is deferred, and what comes when.
        deferred_share: of the rewards, from 0 to 1.
        call_tool: what makes the agent's tool calls.
        blobs: takes the blobs of the session's anchors; without it none are captured.
        levels: of the curriculum, that the session is given one after another at some time.
    """
    log = MemoryLog(session_id)
    machine = SessionMachine(program, config)
    anchors = Anchors(log, machine, blobs)
    output = machine.start()
    coming: list[Callable[[], Input]] = []
    if isinstance(output, Started):
        log.started(output)
        prior = output.observation
        rewards = Rewards(log, scorer, per_episode=config.reward_per_episode)
        changes = list(_changes(log, config, levels))
        while machine.ended is None:
            if changes and chance.random() < CHANGED_SHARE:
                machine.deliver(changes.pop(0)())
                continue
            if coming and (machine.awaiting is not None or chance.random() < 0.5):
                machine.deliver(coming.pop(chance.randrange(len(coming)))())
                continue
            taken = machine.step()
            turn = taken if isinstance(taken, Called) else None
            if isinstance(taken, Stepped):
                log.stepped(taken)
                anchors.log()
                reward = rewards.of(taken, prior)
                if reward is not None:
                    if chance.random() < deferred_share:
                        reward = partial(_deferred, log, taken, coming, reward)
                    coming.append(reward)
                prior, turn = taken.reset_observation or taken.observation, taken.called
            if turn is not None:
                log.called(turn)
                coming += [
                    partial(_answered, log, turn, index, call_tool)
                    for index in range(len(turn.calls))
                ]
    if machine.ended is not None:
        log.ended(machine.ended)
    machine.close()
    return log.rows


def _changes(
    log: MemoryLog, config: SessionConfig, levels: Sequence[int]
) -> Iterator[Callable[[], Input]]:
    previous = config.curriculum_level or 0
    for n, level in enumerate(levels, 1):
        yield partial(log.changed, n, level, previous)
        previous = level


def _deferred(
    log: MemoryLog,
    stepped: Stepped,
    coming: list[Callable[[], Input]],
    reward: Callable[[], Input],
) -> Input:
    """Say that a reward comes later, and have it come."""
    notice = deferred_input(stepped.step, DEFERRED_CODE, stepped.chain[:CAUSE_BYTES])
    log.deferred(notice)
    coming.append(reward)
    return notice


def _answered(log: MemoryLog, turn: Called, index: int, call_tool: CallTool) -> Input:
    return log.answered(turn, index, call_tool(turn.calls[index]))
