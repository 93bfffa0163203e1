"""Torch's CPU generator, lent to one session at a time.

Torch draws in compiled code, so its functions cannot be redirected as `dsec.platform.virtual` does
with the others; the state of its one generator is swapped instead, about 3 µs a session and step.
That is worth it only for sessions whose code can reach torch: `uses_torch`.

    for each session of the lane that uses torch:
        torch_enter(chance); run its code; torch_exit(chance)

``torch_enter`` while another session is still in swaps directly, which saves half of the cost; the
last ``torch_exit`` gives the process its own state back. One thread of a process does this.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Final

import numpy as np

from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace
from dsec.session.seeds import derive


class _Loaded:
    """Reaches a session's state while torch's own generator holds it, for snapshots."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.generator = torch.default_generator

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.array(self.generator.get_state().numpy(), dtype=np.uint8)

    def write(self, state: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.generator.set_state(self.torch.from_numpy(state.copy()))


class _Process:
    """Who has the generator, and what it held before."""

    loaded: _Loaded | None = None
    holder: Chance | None = None
    own_state: Any = None


_process: Final = _Process()


def torch_enter(chance: Chance) -> None:
    """Torch's global draws are this session's until `torch_exit` or the next `torch_enter`."""
    loaded = _process.loaded
    if loaded is None:
        import torch

        loaded = _process.loaded = _Loaded(torch)
    holder = _process.holder
    if holder is chance:
        return
    state = chance.torch_state
    if not isinstance(state, loaded.torch.Tensor):
        state = _first_state(loaded.torch, chance)
    leaving = loaded.generator.get_state()
    if holder is None:
        _process.own_state = leaving
    else:
        holder.torch_state = leaving
        holder.torch_loaded = None
    loaded.generator.set_state(state)
    chance.torch_loaded = loaded
    _process.holder = chance


def torch_exit(chance: Chance) -> None:
    """Keep the session's state and give the process its own back. Not in: nothing happens."""
    loaded = _process.loaded
    if loaded is None or _process.holder is not chance:
        return
    chance.torch_state = loaded.generator.get_state()
    chance.torch_loaded = None
    loaded.generator.set_state(_process.own_state)
    _process.holder = None


def _first_state(torch: Any, chance: Chance) -> Any:
    if chance.torch_state is not None:  # restored from a snapshot: an array
        return torch.from_numpy(np.array(chance.torch_state, dtype=np.uint8))
    chance.used.add("torch")
    generator = torch.Generator()
    generator.manual_seed(derive(chance.seed, "torch", 0))
    return generator.get_state()


def uses_torch(namespace: CodeNamespace) -> bool:
    """Whether the code can reach torch: directly, or through the packages that it imports.

    Follows the modules that each imported package holds, so it errs towards yes; what a library
    imports lazily is seen once it has been imported. Costs milliseconds: once per spec.
    """
    if "torch" not in sys.modules:
        return False
    packages: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        held = packages.setdefault(name.partition(".")[0], set())
        if issubclass(type(module), types.ModuleType):
            held.update(_packages_held(module))
    seen: set[str] = set()
    waiting = list(namespace.imported)
    while waiting:
        package = waiting.pop()
        if package not in seen and package not in _HUBS:
            seen.add(package)
            waiting += packages.get(package, ())
    return "torch" in seen


_HUBS: Final = frozenset(sys.stdlib_module_names) | {"__main__", "dsec"}
"""What holds references to everybody (registries, hooks) without using them."""


def _packages_held(module: types.ModuleType) -> set[str]:
    held = set()
    for value in list(vars(module).values()):
        # `type`, since `isinstance` asks the value, and some answer with a deprecation warning.
        kind, name = type(value), None
        if issubclass(kind, types.ModuleType):
            name = value.__name__
        elif issubclass(kind, type | types.FunctionType):
            name = value.__module__
        if isinstance(name, str):
            held.add(name.partition(".")[0])
    return held
