"""A session machine made from an anchor's blob, in place of one that begins at step 0.

The blob holds a pickle, and loading a pickle runs whatever is in it. So this happens only in
workers, where the session's own code runs anyway, and only after the blob's bytes were found equal
to the hash that the log has of them.
"""

from __future__ import annotations

import pickle
from typing import Any

import lz4.frame

from dsec.session.adapters.gymnasium import GymnasiumAdapter
from dsec.session.anchors import FOLD_VERSION, Anchoring, aside, last_state_hash, restorer
from dsec.session.io import AWAITS_RESULTS, Stepped
from dsec.session.late import Late, turn_of_plain
from dsec.session.machine import SessionMachine
from dsec.session.raised import is_ours, told_in_a_line
from dsec_contracts.anchor import ANCHOR_STATE_BYTES_MAX
from dsec_contracts.canonical import decode


class NotRestorable(Exception):
    """A blob that no machine can be made from. Says why."""


def restored(
    pristine: SessionMachine, blob: bytes, anchor_id: str, step_fact: bytes, chain: bytes
) -> SessionMachine:
    """A machine that stands right behind the step where an anchor was taken. Runs user code.

    Args:
        pristine: a machine of the same session that was not started; it is left alone.
        blob: its bytes are those that the log names.
        step_fact, chain: what the log has of the step before the anchor.

    Raises:
        NotRestorable: another session's blob, another version's, or its code no longer takes it.
    """
    machine = SessionMachine(pristine._program, pristine.config, pristine._interposition)
    try:
        _restore(machine, blob, anchor_id, step_fact, chain)
    except BaseException:
        machine.close()
        raise
    return machine


def _restore(
    machine: SessionMachine, blob: bytes, anchor_id: str, step_fact: bytes, chain: bytes
) -> None:
    machine._interposition.enter(machine._chance)
    try:
        told = _unpacked(blob)
        if told["fold_version"] != FOLD_VERSION or told["anchor_id"] != anchor_id:
            raise NotRestorable(
                f"it holds anchor {told['anchor_id']} in version {told['fold_version']}"
            )
        _take_position(machine, told["machine"])
        if machine.chain != chain or machine.last is None or machine.last.fact != step_fact:
            raise NotRestorable("it was taken behind another step than the log has there")
        if machine._curriculum is not None:
            machine._curriculum.restore(told["curriculum"])
        _take_objects(machine, told)
        machine._chance.set_state(told["chance"])
        machine._anchors = machine._anchors or Anchoring(machine._program.agent.anchors)
        machine._anchors.last_id = anchor_id
        machine._anchors.delayed_at = told["machine"].get("delayed_at")
    except MemoryError:
        raise
    except BaseException as error:
        if is_ours(error) and isinstance(error, NotRestorable):
            raise
        raise NotRestorable(told_in_a_line(error)) from error
    finally:
        machine._interposition.exit(machine._chance)


def _unpacked(blob: bytes) -> dict[str, Any]:
    size = lz4.frame.get_frame_info(blob)["content_size"]
    if not 0 < size <= ANCHOR_STATE_BYTES_MAX:
        raise NotRestorable(f"it would unpack to {size} bytes")
    value = decode(lz4.frame.decompress(blob))
    if not isinstance(value, dict):
        raise NotRestorable("it holds no map")
    return value


def _take_position(machine: SessionMachine, told: dict[str, Any]) -> None:
    machine._step, machine._episode = told["step"], told["episode"]
    machine._done_episodes, machine._episode_begun = told["done_episodes"], told["episode_begun"]
    machine.chain, machine._caused_by = told["chain"], told["caused_by"]
    machine._prior = told["prior"]
    last = Stepped(*told["last"])
    machine.awaiting = last.step
    if machine.config.reward_per_episode:
        machine._episode_first = told["episode_first"]
        if last.closes_from is None:
            machine.awaiting = None
    if told["called"] is not None:
        called = turn_of_plain(told["called"])
        last = last._replace(called=called)
        assert machine._turns is not None
        machine._turns.expect(called)
        if machine.awaiting is None and machine._turns.answers is not None:
            machine.awaiting = AWAITS_RESULTS
    machine.last = last


def _take_objects(machine: SessionMachine, told: dict[str, Any]) -> None:
    with aside(machine):
        env, agent, observation, info, final, space, *late = pickle.loads(told["objects"])
        machine._env = GymnasiumAdapter.resumed(env, told["memory"], last_state_hash(machine))
    machine._observation, machine._info, machine._final = observation, info, final
    _take_late(machine, told.get("late"), *late)
    if told["is_whole"]:
        machine._given = {"action_space": space}
        machine._bind(agent)
        return
    machine._make_agent(told["anchor_id"])
    take = restorer(machine._agent)
    if take is None:
        raise NotRestorable("the agent has no set_state(state)")
    take(agent)
    _continue_space(machine._given["action_space"], space)


def _take_late(
    machine: SessionMachine, outstanding: dict[str, Any] | None, told: list[Any] | None = None
) -> None:
    """What was outstanding is outstanding again, and waited for where it was."""
    config = machine.config
    if outstanding is not None:
        late = machine._late = machine._late or Late(config.lag_steps, config.reward_lag_steps_max)
        late.restore(outstanding, told or [])
    if machine._late is not None and config.lag_steps is not None:
        machine._await(machine._late)


def _continue_space(made: Any, captured: Any) -> None:
    """Let the action space that the agent holds go on where it was, its generator above all."""
    if hasattr(made, "__dict__") and type(made) is type(captured):
        vars(made).clear()
        vars(made).update(vars(captured))
