"""The check at registration: does the code load, and is the environment deterministic?

An environment is run twice, side by side with the same seed, through the very machine that runs
sessions, with an agent that samples its action space. What differs in one of many steps is named;
comparing a single step would miss most of what goes wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsec.client.code_files import load_code
from dsec.client.sealing import SealedSpec
from dsec.client.told import code_sentence, last_line
from dsec.client.yaml_file import SpecFileError
from dsec.platform import virtual
from dsec.platform.copies import ending_copies
from dsec.platform.interposition import interposition_of
from dsec.session.adapters.gymnasium import EnvError, GymnasiumAdapter, env_factory
from dsec.session.code_errors import CodeError
from dsec.session.documents import AgentDocument
from dsec.session.fitting import lacks, misfit
from dsec.session.io import Ended, Input, SessionConfig, Started, Stepped, reward_input
from dsec.session.machine import SessionMachine
from dsec.session.program import Program
from dsec.tool.call import KEY_ARGUMENT
from dsec_contracts.canonical import decode, encode
from dsec_contracts.reward import CAUSE_BYTES
from dsec_contracts.step import STEP_FIELDS

CHECK_STEPS = 64
_RESET_FIELDS = ("state_hash", "observation_hash", "info")


class Sampler:
    """The agent of the check: samples the action space, with the session's own seed."""

    def __init__(self, session_config: dict[str, Any]) -> None:
        self._space = session_config["action_space"]

    def step(self, observation: Any) -> dict[str, Any]:
        """A sampled action."""
        return {"action": self._space.sample()}


@ending_copies()
def check_spec(spec: SealedSpec, *, seed: int = 0, steps: int = CHECK_STEPS) -> None:
    """Load a spec's code, and try it out where it is an environment.

    Raises:
        SpecFileError: it cannot be used; says why.
    """
    if spec.kind == "env":
        check_env(spec, seed=seed, steps=steps)
    elif spec.kind == "agent":
        namespace = load_code(spec.spec_hash, spec.files, spec.name)
        try:
            found = namespace.load(spec.document.entry)
        except CodeError as error:
            raise SpecFileError(f"agent {spec.name}: {code_sentence(error)}") from error
        if not callable(getattr(found, "step", None)):
            raise SpecFileError(f"agent {spec.name}: it has no step(): add `def step(self, obs)`")
        _check_made(spec, found)
        _check_hears(spec, found)
    elif spec.kind == "tool" and spec.document.kind == "python":
        namespace = load_code(spec.spec_hash, spec.files, spec.name)
        try:
            function = namespace.load(spec.document.entry)
        except CodeError as error:
            raise SpecFileError(f"tool {spec.name}: {code_sentence(error)}") from error
        if not callable(function):
            raise SpecFileError(f"tool {spec.name}: {spec.document.entry} is no function")
        why = misfit(function, spec.document.parameters, KEY_ARGUMENT)
        if why is not None:
            raise SpecFileError(f"tool {spec.name}: parameters: {spec.document.entry}: {why}")


def _check_made(spec: SealedSpec, cls: Any) -> None:
    """An agent is made with one argument; a class without `__init__` takes none."""
    try:
        inspect.signature(cls).bind({})
    except ValueError:
        return  # a class in C tells no signature
    except TypeError as error:
        raise SpecFileError(
            f"agent {spec.name}: it is made with one argument, the session's configuration, which "
            f"it does not take ({error}): add `def __init__(self, session_config)`"
        ) from error


def _check_hears(spec: SealedSpec, cls: Any) -> None:
    """An agent with tools that do not block must hear what they return."""
    late = [n for n, use in enumerate(spec.document.tools) if not use.blocking]
    if late and lacks(cls, "on_tool_result"):
        raise SpecFileError(
            f"agent {spec.name}: tools.{late[0]}.blocking: {spec.document.tools[late[0]].name} is "
            "declared with false, and the agent has no on_tool_result, so that its results would "
            "reach nobody: add `def on_tool_result(self, tool_id, result)`, or leave out `blocking`"
        )


@ending_copies()
def check_curriculum(spec: SealedSpec, level: int) -> None:
    """Reset an environment as a session with a curriculum does.

    Raises:
        SpecFileError: it takes no options, or cannot be reset with them.
    """
    program = _program(spec, [])
    config = SessionConfig(0, 1, curriculum_level=level)
    with _virtual():
        machine = SessionMachine(program, config, interposition_of(*program.namespaces))
        try:
            _started(spec.name, machine)
        except SpecFileError as error:
            raise SpecFileError(f"curriculum_level: {error}") from error
        finally:
            _close(machine)


def check_env(spec: SealedSpec, *, seed: int = 0, steps: int = CHECK_STEPS) -> int:
    """Run an environment twice with one seed. Returns the number of steps that agreed.

    One that says that it is not deterministic is run once, to see that it runs.

    Raises:
        SpecFileError: it cannot be made, cannot be read, or the two runs differ.
    """
    if not spec.document.deterministic_mode:
        return sum(isinstance(output, Stepped) for output in played(spec, steps, seed=seed))
    spaces: list[Any] = []
    program = _program(spec, spaces)
    with _virtual():
        one, two = (
            SessionMachine(
                program, SessionConfig(seed, steps), interposition_of(*program.namespaces)
            )
            for _ in range(2)
        )
        try:
            return _compare(spec.name, one, two, steps, spaces)
        finally:
            _close(one)
            _close(two)


def played(spec: SealedSpec, steps: int, *, seed: int = 0) -> Iterator[Started | Stepped]:
    """The reset and some steps of an environment whose agent samples its action space; no step
    where it does not say which actions there are.

    Raises:
        SpecFileError: it cannot be made or read.
    """
    spaces: list[Any] = []
    program = _program(spec, spaces)
    with _virtual():
        machine = SessionMachine(
            program, SessionConfig(seed, steps), interposition_of(*program.namespaces)
        )
        try:
            yield _started(spec.name, machine)
            if not all(callable(getattr(space, "sample", None)) for space in spaces):
                return
            for n in range(steps):
                stepped = _stepped(spec.name, machine)
                yield stepped
                machine.deliver(_nothing(n, stepped))
        finally:
            _close(machine)


def _nothing(n: int, stepped: Stepped) -> Input:
    """A reward of 0, for an agent that does not listen."""
    cause = stepped.chain[:CAUSE_BYTES]
    return reward_input(n, 0.0, encode([n, 1, 0.0, {}, cause]), cause)


@ending_copies()
def _program(spec: SealedSpec, spaces: list[Any]) -> Program:
    """What the check runs; action spaces of the environments it makes are put into `spaces`."""
    namespace = load_code(spec.spec_hash, spec.files, spec.name)
    document = spec.document
    try:
        make_env = env_factory(document.entry, document.kwargs, namespace)
    except CodeError as error:
        raise SpecFileError(f"environment {spec.name}: {code_sentence(error)}") from error
    except EnvError as error:
        raise SpecFileError(f"environment {spec.name}: {error}") from error

    def make() -> GymnasiumAdapter:
        env = make_env()
        spaces.append(env.action_space)
        return env

    agent = AgentDocument(entry="dsec.client.check:Sampler")
    # No bound on episodes: the check wants its steps, and resets are part of it.
    env = document.model_copy(update={"episodes_max": None})
    return Program(agent, env, Sampler, make, False, (namespace, namespace))


def _compare(
    name: str, one: SessionMachine, two: SessionMachine, steps: int, spaces: list[Any]
) -> int:
    first, second = (_started(name, machine) for machine in (one, two))
    _same(name, "at the first reset", _RESET_FIELDS, first.reset, second.reset)
    if not all(callable(getattr(space, "sample", None)) for space in spaces):
        return 0  # it does not say which actions there are, so only resets can be compared
    for n in range(steps):
        a, b = (_stepped(name, machine) for machine in (one, two))
        _same(name, f"at step {n}", STEP_FIELDS, a.fact, b.fact)
        for machine, output in ((one, a), (two, b)):
            machine.deliver(_nothing(n, output))
    return steps


@ending_copies()
def _started(name: str, machine: SessionMachine) -> Started:
    output = machine.start()
    if isinstance(output, Ended):
        raise SpecFileError(f"environment {name}: {last_line(output.message)}")
    return output


@ending_copies()
def _stepped(name: str, machine: SessionMachine) -> Stepped:
    output = machine.step()
    if isinstance(output, Ended):
        raise SpecFileError(f"environment {name}, step {output.steps}: {last_line(output.message)}")
    assert isinstance(output, Stepped)  # the agent of the check has no tools
    return output


@ending_copies()
def _close(machine: SessionMachine) -> None:
    machine.close()


def _same(name: str, when: str, fields: tuple[str, ...], one: bytes, two: bytes) -> None:
    if one == two:
        return
    pairs = zip(fields, decode(one), decode(two), strict=True)
    differing = [field for field, a, b in pairs if encode(a) != encode(b)]
    raise SpecFileError(
        f"environment {name} is not deterministic: two runs with one seed differ {when} in "
        f"{', '.join(differing)}; draw from self.np_random alone, and keep nothing that outlives "
        "reset(seed=...), or say deterministic_mode: false in env_spec.yaml"
    )


@contextmanager
def _virtual() -> Iterator[None]:
    """Clocks and generators as in a worker, for as long as the check runs."""
    before = virtual.installed()
    virtual.install()
    try:
        yield
    finally:
        if not before:
            virtual.uninstall()
