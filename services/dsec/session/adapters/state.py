"""The state of an environment, as bytes: what `state_hash` covers when an environment has none.

Everything an environment keeps in its attributes counts, wrappers included, and the state of every
generator it holds: a restored environment that equals another in all of these goes on equally.
Plain attributes take a fast path (`marshal` version 2: by value, without references between
objects); the rest is walked. What can be read in neither way is refused by name, since a state
that is hashed in part proves nothing.
"""

from __future__ import annotations

import ctypes
import marshal
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from dsec.session.adapters.readable import DEPTH_MAX, PLAIN, canonical_bytes, slot_names
from dsec.session.chain import digest16
from dsec_contracts.canonical import encode

LARGE_LEAVES_MIN = 256
"""A container with more leaves than this is large: tables of transitions, mostly."""
LARGE_EVERY_STEPS = 64
"""A large container is read again when it is replaced, at each reset, and this often between."""

# Descriptions and windows: they say how an environment is made or drawn, not where it stands.
_IGNORED = frozenset(
    (
        *("env", "spec", "_spec", "_cached_spec", "metadata", "_metadata", "render_mode"),
        *("screen", "clock", "window_surface", "surf", "isopen", "_np_random_seed"),
        *("_action_space", "_observation_space", "_saved_kwargs"),
        *("_ezpickle_args", "_ezpickle_kwargs"),
    )
)
_ARRAY_KINDS = "biufcSU"


def generator_state(generator: Any) -> Callable[[], bytes]:
    """A function that gives the state of a numpy Generator, quickly where that can be proven.

    Reading PCG64's state through its property builds dictionaries, 3 us a step. The words lie at a
    fixed address; that they are the right ones is checked against the property when bound.
    """
    bits = generator.bit_generator

    def slow() -> bytes:
        return encode(bits.state)

    if type(bits) is not np.random.PCG64:
        return slow
    address = bits.ctypes.state_address
    words = ctypes.c_void_p.from_address(address).value
    if not words:
        return slow
    view = (ctypes.c_char * 32).from_address(words)
    rest = (ctypes.c_char * 8).from_address(address + ctypes.sizeof(ctypes.c_void_p))
    state = bits.state
    expected = (
        state["state"]["state"].to_bytes(16, "little")
        + state["state"]["inc"].to_bytes(16, "little")
        + state["has_uint32"].to_bytes(4, "little")
        + state["uinteger"].to_bytes(4, "little")
    )
    if view.raw + rest.raw != expected:
        return slow
    return lambda: view.raw + rest.raw


class Layer:
    """One object of the wrapper chain: which of its attributes are read, and how.

    `large`: by name, the large containers that were read: each itself, its digest, and whether it
    holds arrays of objects. `reads`: how many readings there were since the reset.
    """

    __slots__ = (
        "_slots",
        "_target",
        "arrays",
        "attributes",
        "generators",
        "large",
        "plain",
        "reads",
        "slow",
    )

    def __init__(self, target: Any) -> None:
        self._target = target
        self.large: dict[str, tuple[Any, bytes, bool]] = {}
        self.reads = 0
        self._slots = slot_names(type(target))
        self.attributes: dict[str, Any] = getattr(target, "__dict__", {})
        self.plan()

    def plan(self) -> None:
        """Sort the attributes by how they can be read."""
        self.plain: list[str] = []
        self.slow: list[str] = []
        self.generators: list[str] = []
        self.arrays: list[tuple[str, Any]] = []
        for name, value in sorted(self.attributes.items()):
            if name in _IGNORED or _is_space(value):
                continue
            if _is_plain(value, 0):
                self.plain.append(name)
                if type(value) is np.ndarray:
                    self.arrays.append((name, value.dtype))
            elif isinstance(value, np.random.Generator):
                self.generators.append(name)
            else:
                self.slow.append(name)

    def begin(self) -> None:
        """A reset happened: read everything anew."""
        self.reads = 0

    @property
    def has_rest(self) -> bool:
        """Whether it keeps state that `marshal` cannot read at once."""
        return bool(self.slow or self._slots)

    def read_rest(self) -> bytes:
        """What is neither plain nor a generator."""
        result = b""
        for name in self.slow:
            value = self.attributes[name]
            if _is_plain(value, 0) or isinstance(value, np.random.Generator):
                raise KeyError(name)
            result += self._walk_slow(name, value)
        for name, slot in self._slots:
            if name not in _IGNORED and hasattr(self._target, slot):
                path = f"{type(self._target).__name__}.{name}"
                result += encode(name) + canonical_bytes(getattr(self._target, slot), path)
        self.reads += 1
        return result

    def _walk_slow(self, name: str, value: Any) -> bytes:
        path = f"{type(self._target).__name__}.{name}"
        if not isinstance(value, (dict, list, tuple)):
            return canonical_bytes(value, path)
        known = self.large.get(name)
        same = known is not None and known[0] is value
        if known is not None and same and self.reads % LARGE_EVERY_STEPS:
            return known[1]
        # Of a large container that is only asked once: it costs more than the reading.
        has_objects = known[2] if known is not None and same else _has_objects(value, 0)
        try:
            read = canonical_bytes(value, path) if has_objects else marshal.dumps(value, 2)
        except ValueError:
            read = canonical_bytes(value, path)
        if _leaves(value, LARGE_LEAVES_MIN + 1) > LARGE_LEAVES_MIN:
            self.large[name] = (value, digest16(read), has_objects)
            return digest16(read)
        self.large.pop(name, None)
        return read


class StateProbe:
    """Reads the state of a chain of wrappers around an environment.

    The plain attributes of all layers are read in one go, since every step of every session pays
    for this: four small reads cost more than what they read.

    `layers`, `attributes_count` and `bind` are for `state_memory.py` too.
    """

    __slots__ = (
        "_arrays",
        "_attributes",
        "_generators",
        "_plain",
        "_rest",
        "attributes_count",
        "layers",
    )

    def __init__(self, env: Any) -> None:
        self.layers: list[Layer] = []
        while True:
            self.layers.append(Layer(env))
            inner = env.__dict__.get("env") if hasattr(env, "__dict__") else None
            if inner is None or inner is env:
                break
            env = inner
        self.bind()

    def bind(self) -> None:
        """Prepare the readings, by how the layers sort their attributes now."""
        layers = self.layers
        self._attributes = [layer.attributes for layer in layers]
        # One that comes is seen by their number, one that goes by the reading.
        self.attributes_count = sum(map(len, self._attributes))
        self._plain = [(itemgetter(*la.plain), la.attributes) for la in layers if la.plain]
        self._arrays = [(la.attributes, name, kind) for la in layers for name, kind in la.arrays]
        self._generators: list[tuple[dict[str, Any], str, Any, Callable[[], bytes]]] = [
            (la.attributes, name, la.attributes[name], generator_state(la.attributes[name]))
            for la in layers
            for name in la.generators
        ]
        self._rest = [layer for layer in layers if layer.has_rest]

    def _plan(self) -> None:
        for layer in self.layers:
            layer.plan()
        self.bind()

    def begin(self) -> None:
        """A reset happened: the next reading starts from nothing known."""
        for layer in self.layers:
            layer.begin()

    def read(self) -> bytes:
        """The state as bytes. Equal states give equal bytes.

        Raises:
            StateError: an attribute cannot be read.
        """
        if sum(map(len, self._attributes)) != self.attributes_count:
            self._plan()
        try:
            return self._read()
        except (ValueError, KeyError):  # an attribute went, or has a value of another sort
            self._plan()
            return self._read()

    def _read(self) -> bytes:
        for attributes, name, dtype in self._arrays:
            # An array of objects would be read as addresses.
            if getattr(attributes[name], "dtype", dtype) is not dtype:
                raise KeyError(name)
        result = marshal.dumps([get(attributes) for get, attributes in self._plain], 2)
        for n, (attributes, name, bound, _) in enumerate(self._generators):
            value = attributes[name]
            if value is not bound:  # a reset with a seed makes a new one
                if not isinstance(value, np.random.Generator):
                    raise KeyError(name)
                self._generators[n] = (attributes, name, value, generator_state(value))
            result += self._generators[n][3]()
        for layer in self._rest:
            result += layer.read_rest()
        return result


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is np.ndarray:
        return bool(value.dtype.kind in _ARRAY_KINDS and value.flags.c_contiguous)
    if isinstance(value, np.generic):
        return value.dtype.kind in _ARRAY_KINDS
    if kind in (list, tuple) and depth < 4:
        return len(value) <= LARGE_LEAVES_MIN and all(_is_plain(item, depth + 1) for item in value)
    return False


def _has_objects(value: Any, depth: int) -> bool:
    """Whether a container holds an array of objects, which `marshal` would read as addresses."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.hasobject)
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return False
    if depth >= DEPTH_MAX:
        return True  # or a container in itself: the walk knows what to do
    items = value.values() if isinstance(value, dict) else value
    return any(_has_objects(item, depth + 1) for item in items)


def _leaves(value: Any, most: int) -> int:
    """How many leaves a container has; counting stops at `most`."""
    if not isinstance(value, (dict, list, tuple)):
        return 1
    count = 0
    for item in value.values() if isinstance(value, dict) else value:
        count += _leaves(item, most - count)
        if count >= most:
            break
    return count


def _is_space(value: Any) -> bool:
    return any(base.__module__.startswith("gymnasium.spaces") for base in type(value).__mro__)
