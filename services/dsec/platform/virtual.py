"""The process's clocks and generators, redirected to the session whose code is running.

`install` replaces the functions of ``time``, ``os``, ``uuid``, ``random`` and ``numpy.random`` once
per process. Each replacement asks which `Chance` is active on this thread: none, and the original
answers (asyncio, the bus client, telemetry); one, and the session's own clock or generator does.
Dispatching costs a tenth of a microsecond a call, where swapping the state of the global generators
at every step would cost 26 (``random``) and 148 (``numpy``). Only torch is swapped, since its
functions are compiled: see `torch_enter`.

What asks for entropy comes here too: ``random.Random()``, ``SystemRandom``, ``secrets``,
``numpy.random.default_rng()`` and ``SeedSequence()`` all end in ``random._urandom`` or
``Random.seed(None)``.

Limits. A library that captured an original before `install` (``from time import time``) keeps it:
`undeclared_uses` names these. Compiled code that reads clocks or entropy itself (uvloop, Rust
extensions, ``torch.Generator().seed()``), waiting on locks and sockets, and files are real. Workers
run with ``TZ=UTC`` and a fixed ``PYTHONHASHSEED``, which cannot be set from inside.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dsec.platform.process_guard import LOOP_MODULES, kill_guards, loop_guards, signal_guards
from dsec.session import chance
from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace

slot: Final = chance.slot
# Imported here, not when first used: its hidden generator asks for entropy as it is made.
_mtrand: Final[Any] = importlib.import_module("numpy.random.mtrand")
_originals: list[tuple[Any, str, Any]] = []


def installed() -> bool:
    """Whether the process's functions are redirected."""
    return bool(_originals)


def install() -> None:
    """Redirect. Repeating it changes nothing."""
    if _originals:
        return
    # The generator of temporary names is made once per process, from entropy: were it made within
    # a session, that session would draw once more than the others.
    tempfile.mkdtemp.__globals__["_get_candidate_names"]().rng  # noqa: B018
    for owner, name, replacement in (
        *_clock_patches(),
        *_entropy_patches(),
        *_random_patches(),
        *_numpy_patches(),
        *_redirects(signal, signal_guards()),
        *_redirects(os, kill_guards()),
        *(patch for module in LOOP_MODULES for patch in _redirects(module, loop_guards())),
    ):
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)


def uninstall() -> None:
    """Give the originals back."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


Patch = tuple[Any, str, Any]


class _Redirect:
    """A callable that asks the session, if there is one.

    No plain function, because a function stored in a class (``clock = time.time``) would become a
    method and be passed the instance; the built-in that it replaces would not.
    """

    __slots__ = ("__dict__", "_original", "_virtual")

    def __init__(self, original: Callable[..., Any], virtual: Callable[..., Any]) -> None:
        self._original = original
        self._virtual = virtual
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = slot.chance
        if active is None:
            return self._original(*args, **kwargs)
        return self._virtual(active, *args, **kwargs)

    def __reduce__(self) -> str:
        return str(self.__dict__["__name__"])  # pickled by name, like the original


def _redirects(owner: Any, virtuals: dict[str, Callable[..., Any]]) -> list[Patch]:
    return [
        (owner, name, _Redirect(getattr(owner, name), virtual))
        for name, virtual in virtuals.items()
        if hasattr(owner, name)
    ]


def _clock_patches() -> list[Patch]:
    utc, asctime, strftime = time.gmtime, time.asctime, time.strftime

    def broken_down(active: Chance, seconds: float | None = None) -> time.struct_time:
        return utc(active.now_s() if seconds is None else seconds)

    def ascii_time(active: Chance, parts: Any = None) -> str:
        return asctime(broken_down(active) if parts is None else parts)

    def formatted(active: Chance, form: str, parts: Any = None) -> str:
        return strftime(form, broken_down(active) if parts is None else parts)

    def ctime(active: Chance, seconds: float | None = None) -> str:
        return asctime(broken_down(active, seconds))

    epoch_clocks = {getattr(time, "CLOCK_REALTIME", 0)}

    def clock_ns(active: Chance, clock: int) -> int:
        return active.time_ns() if clock in epoch_clocks else active.monotonic_ns()

    def clock(active: Chance, which: int) -> float:
        return clock_ns(active, which) / 1_000_000_000

    counters = ("monotonic", "perf_counter", "process_time", "thread_time")
    return _redirects(
        time,
        {
            "time": Chance.now_s,
            "time_ns": Chance.time_ns,
            **dict.fromkeys(counters, Chance.monotonic),
            **dict.fromkeys([f"{name}_ns" for name in counters], Chance.monotonic_ns),
            "sleep": Chance.sleep,
            "clock_gettime": clock,
            "clock_gettime_ns": clock_ns,
            "gmtime": broken_down,
            "localtime": broken_down,  # a session's local zone is UTC
            "ctime": ctime,
            "asctime": ascii_time,
            "strftime": formatted,
        },
    )


def _entropy_patches() -> list[Patch]:
    def uuid4(active: Chance) -> uuid.UUID:
        return uuid.UUID(bytes=active.uuid_bytes(), version=4)

    def uuid1(active: Chance, node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
        # Node and clock sequence name the machine; a session's are drawn like all else.
        return uuid.UUID(bytes=active.uuid_bytes(), version=1)

    def getrandom(active: Chance, size: int, flags: int = 0) -> bytes:
        return active.urandom(size)

    return [
        *_redirects(os, {"urandom": Chance.urandom, "getrandom": getrandom}),
        *_redirects(random, {"_urandom": Chance.urandom}),
        *_redirects(uuid, {"uuid1": uuid1, "uuid4": uuid4}),
    ]


def _dispatcher(base: type, real: Any, select: Callable[[Chance], Any], *args: Any) -> Any:
    """An instance of ``base`` whose public methods run on ``real`` or on the session's own."""

    def method(name: str) -> Callable[..., Any]:
        original = getattr(real, name)

        @functools.wraps(original)
        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            active = slot.chance
            if active is None:
                return original(*args, **kwargs)
            return getattr(select(active), name)(*args, **kwargs)

        return dispatch

    names = [
        name for name in dir(base) if not name.startswith("_") and callable(getattr(base, name))
    ]
    kind: Any = type(base.__name__, (base,), {name: method(name) for name in names})
    made = kind.__new__(kind, *args)
    if args:
        made.__init__(*args)
    return made


def _bound_to(module: Any, real: Any, dispatcher: Any) -> list[Patch]:
    """The module's functions that are methods of its hidden generator."""
    return [
        (module, name, getattr(dispatcher, value.__name__))
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is real and hasattr(dispatcher, value.__name__)
    ]


def _random_patches() -> list[Patch]:
    real: Any = vars(random)["_inst"]
    original_seed = random.Random.seed

    @functools.wraps(original_seed)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        active = slot.chance
        if a is None and active is not None:
            a = int.from_bytes(active.urandom(32), "big")
        original_seed(self, a, version)

    dispatcher = _dispatcher(random.Random, real, lambda active: active.random)
    return [
        *_bound_to(random, real, dispatcher),
        (random, "_inst", dispatcher),
        (random.Random, "seed", seed),
    ]


def _numpy_patches() -> list[Patch]:
    real = _mtrand._rand
    dispatcher = _dispatcher(
        np.random.RandomState, real, lambda active: active.numpy, real._bit_generator
    )
    replace_bits = _mtrand.set_bit_generator

    def set_bit_generator(bitgen: Any) -> None:
        if slot.chance is not None:
            raise RuntimeError("a session cannot replace numpy's global bit generator")
        _mtrand._rand = real  # the original works on whatever that name holds
        try:
            replace_bits(bitgen)
        finally:
            _mtrand._rand = dispatcher

    return [
        *_bound_to(np.random, real, dispatcher),
        *_bound_to(_mtrand, real, dispatcher),
        # `seed`, `ranf` and `sample`, and scipy's default generator, look this name up.
        (_mtrand, "_rand", dispatcher),
        (np.random, "set_bit_generator", set_bit_generator),
        (_mtrand, "set_bit_generator", set_bit_generator),
    ]


def undeclared_uses(namespace: CodeNamespace) -> set[str]:
    """Originals that the installed packages behind ``namespace`` captured before `install`.

    Each as ``module.name``: a static hint (the library may never call it), for packages that are
    already imported. Costs milliseconds: once per spec, not per session.
    """
    captured = {
        id(original): name
        for owner, name, original in _originals
        if isinstance(owner, types.ModuleType) and callable(original)
        if owner not in (signal, *LOOP_MODULES) and name not in kill_guards()
    }
    return {
        f"{module.__name__}.{name}"
        for module in _modules_behind(namespace)
        if module not in (time, os, uuid, random, np.random, _mtrand)
        for name, value in list(vars(module).items())
        if id(value) in captured
    }


def _modules_behind(namespace: CodeNamespace) -> list[types.ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in namespace.imported and isinstance(module, types.ModuleType)
    ]
