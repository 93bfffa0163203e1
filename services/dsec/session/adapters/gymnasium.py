"""Gymnasium environments: registered ids, and any class with Gymnasium's `reset` and `step`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from dsec.session.adapters.state import StateProbe
from dsec.session.adapters.state_memory import Memory, memory_of, recall
from dsec.session.chain import digest16
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import telling


class EnvError(Exception):
    """An environment that cannot be made or does not keep to the interface. Has a code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class GymnasiumAdapter:
    """One environment, with what a deterministic session needs beside `step`."""

    __slots__ = ("_env", "_own_hash", "_probe", "action_space", "observation_space", "step")

    def __init__(self, env: Any) -> None:
        for name in ("reset", "step"):
            if not callable(getattr(env, name, None)):
                raise EnvError("env_invalid", f"{type(env).__name__} has no {name}()")
        self._env = env
        self.action_space = getattr(env, "action_space", None)
        self.observation_space = getattr(env, "observation_space", None)
        self.step: Callable[[Any], Any] = env.step
        base = getattr(env, "unwrapped", env)
        self._own_hash = getattr(base, "state_hash", None)
        self._probe: StateProbe | None = None

    def deterministic_reset(
        self, seed: int, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset with a seed; the spaces are seeded too, which `reset(seed=...)` does not do.

        Args:
            options: as `reset` takes them. None: it is not given any.

        Returns:
            The observation and the info.

        Raises:
            EnvError: `reset` does not return `(observation, info)`, takes no seed or no options.
        """
        # Gymnasium's seeds are of 32 bits in places; the upper half stays for nothing.
        small = seed & 0x7FFF_FFFF
        first = self._probe is None
        if first and self.action_space is not None and hasattr(self.action_space, "seed"):
            # Once a session: it goes on from there, and a generator costs as much as many steps.
            self.action_space.seed(small)
        if options is None:
            result = self._env.reset(seed=small)
        else:
            if first:
                _check_takes_options(self._env, options)
            result = self._env.reset(seed=small, options=options)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            told = repr(result)[:200]
            raise EnvError("env_invalid", f"reset must return (observation, info), not {told}")
        if self._probe is None:
            self._probe = StateProbe(self._env)
        self._probe.begin()
        return result

    def state_hash(self) -> bytes:
        """16 bytes that stand for the environment's whole state, its generators included."""
        if self._own_hash is not None:
            own = self._own_hash()
            return digest16(own if isinstance(own, bytes) else str(own).encode())
        assert self._probe is not None, "reset comes first"
        return digest16(self._probe.read())

    @property
    def env(self) -> Any:
        """The environment itself: what an anchor carries."""
        return self._env

    def memory(self) -> Memory:
        """What `state_hash` depends on beside the environment's state."""
        assert self._probe is not None, "reset comes first"
        return memory_of(self._probe)

    @classmethod
    def resumed(cls, env: Any, memory: Memory, state_hash: bytes) -> GymnasiumAdapter:
        """The adapter of an environment that was captured after its first reset.

        Args:
            memory: of the adapter that it was captured from.
            state_hash: what that one gave last, which this one must give again.

        Raises:
            EnvError: `env_invalid`: it gives another hash, so not all of its state came back.
        """
        adapter = cls(env)
        adapter._probe = probe = StateProbe(env)
        try:
            recall(probe, memory)
            whole = adapter.state_hash() == state_hash
        except (KeyError, ValueError, TypeError):  # attributes that are not there
            whole = False
        if not whole:
            raise EnvError(
                "env_invalid",
                f"{type(env).__name__} does not come back whole from a pickle: its state hash is "
                "another (gymnasium.utils.EzPickle, for one, keeps arguments and no state)",
            )
        return adapter

    def agent_action_space(self, seed: int) -> Any:
        """A copy of the action space for the agent, with its own seed."""
        space = copy.deepcopy(self.action_space)
        if space is not None and hasattr(space, "seed"):
            space.seed(seed & 0x7FFF_FFFF)
        return space

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if callable(close := getattr(self._env, "close", None)):
            close()


def _check_takes_options(env: Any, options: Mapping[str, Any]) -> None:
    """Refuse an environment whose `reset` has no `options`, in a sentence that says so."""
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (ValueError, TypeError):  # not written in Python: the call itself will say
        return
    if not any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise EnvError(
            "env_invalid",
            f"reset() of {type(env).__name__} takes no options, and the session is to give it "
            f"{', '.join(options)}: write reset(self, *, seed=None, options=None)",
        )


def env_factory(
    entry: str, kwargs: Mapping[str, Any], namespace: CodeNamespace
) -> Callable[[], GymnasiumAdapter]:
    """What makes the environment of a spec.

    Args:
        entry: `gymnasium:ID`, `file.py:Class` (shipped with the spec) or `module:Class`.

    Raises:
        EnvError: `unknown_environment`: no such id.
        CodeError: the class cannot be loaded.
    """
    scheme, _, name = entry.partition(":")
    if scheme == "gymnasium":
        spec, why = None, ""
        with telling("entry", None):  # `module:ID` imports the module
            try:
                spec = gymnasium.spec(name)
            except (gymnasium.error.Error, ModuleNotFoundError) as error:
                why = str(error)
        if spec is None:
            raise EnvError(
                "unknown_environment", f"env_spec.entry: {entry!r} is not registered: {why}"
            )
        return lambda: GymnasiumAdapter(
            gymnasium.make(
                copy.deepcopy(spec), disable_env_checker=True, **copy.deepcopy(dict(kwargs))
            )
        )
    cls = namespace.load(entry)
    return lambda: GymnasiumAdapter(cls(**copy.deepcopy(dict(kwargs))))
