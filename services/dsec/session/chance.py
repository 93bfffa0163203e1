"""Time and chance as the code of one session sees them.

Two runs of a session must see the same clock, the same uuids and the same draws, also when hundreds
of sessions interleave in one process. So each session has a `Chance` of its own, a pure function of
its seed, its position and what it has drawn so far. Nothing here reads a clock or entropy:
`dsec.platform.virtual` redirects the process's functions to the `Chance` that is active.

The slot is per thread. A telemetry exporter or a pool thread that asks for the time while a session
steps elsewhere gets the real one, and does not advance the session's clock.

Captured generators and clocks (``from time import time`` in an installed library before
`virtual.install`) cannot be redirected; see `dsec.platform.virtual.undeclared_uses`.
"""

from __future__ import annotations

import hashlib
import random
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from dsec.session.seeds import derive

if TYPE_CHECKING:  # the process of a tool needs none of it, and starts a fifth sooner without
    import numpy as np

EPOCH_NS: Final = 1_577_836_800 * 1_000_000_000
"""Where every session's clock starts: 2020-01-01T00:00:00Z."""
STEP_NS: Final = 1_000_000_000
READ_NS: Final = 1_000


class LoadedGenerator(Protocol):
    """A process-wide generator that holds this session's state at the moment (torch's)."""

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...
    def write(self, state: np.ndarray[Any, np.dtype[np.uint8]]) -> None: ...


class Chance:
    """The clock, generators and identifiers of one session.

    ``position`` is the number of environment steps so far, set by the session machine. ``used``
    names the kinds touched: ``time``, ``random``, ``numpy``, ``uuid``, ``urandom``, ``torch``.
    """

    __slots__ = (
        "_last_ns",
        "_numpy",
        "_random",
        "_reads",
        "_slept_ns",
        "_urandom_calls",
        "_uuid_calls",
        "position",
        "seed",
        "torch_loaded",
        "torch_state",
        "used",
    )

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)
        self.position = 0
        self.used: set[str] = set()
        self._reads = 0
        self._slept_ns = 0
        self._last_ns = EPOCH_NS
        self._urandom_calls = 0
        self._uuid_calls = 0
        self._random: random.Random | None = None
        self._numpy: np.random.RandomState | None = None
        # torch's state is opaque here (a tensor or an array of bytes): this package does not
        # import torch. While the process's generator holds it, `torch_loaded` reaches it.
        self.torch_state: Any = None
        self.torch_loaded: LoadedGenerator | None = None

    # -- the clock: one second a step, one microsecond a read, never backwards

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch. Each read is later than the one before it."""
        self.used.add("time")
        self._reads += 1
        now = EPOCH_NS + self.position * STEP_NS + self._slept_ns + self._reads * READ_NS
        # A position that is set back must not turn the clock back.
        self._last_ns = now = max(now, self._last_ns + READ_NS)
        return now

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return self.time_ns() / 1_000_000_000

    def monotonic_ns(self) -> int:
        """Nanoseconds since the session began; also the performance and process counters."""
        return self.time_ns() - EPOCH_NS

    def monotonic(self) -> float:
        """Seconds since the session began."""
        return self.monotonic_ns() / 1_000_000_000

    perf_counter_ns = monotonic_ns
    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Advance the clock instead of waiting."""
        if not seconds >= 0:
            raise ValueError("sleep length must be non-negative")
        self.used.add("time")
        self._slept_ns += round(seconds * 1_000_000_000)

    # -- generators, made when first touched: most sessions touch none

    @property
    def random(self) -> random.Random:
        """What the functions of the module ``random`` draw from."""
        if self._random is None:
            self.used.add("random")
            self._random = random.Random(derive(self.seed, "random", 0))
        return self._random

    @property
    def numpy(self) -> np.random.RandomState:
        """What the legacy functions of ``numpy.random`` draw from."""
        if self._numpy is None:
            import numpy as np

            self.used.add("numpy")
            bits = np.random.MT19937(derive(self.seed, "numpy", 0))
            self._numpy = np.random.RandomState(bits)
        return self._numpy

    def urandom(self, size: int) -> bytes:
        """The bytes that stand for entropy: also the seed of generators made without one."""
        if size < 0:
            raise ValueError("negative argument not allowed")
        self.used.add("urandom")
        self._urandom_calls += 1
        return self._bytes("urandom", self._urandom_calls, size)

    def uuid_bytes(self) -> bytes:
        """Sixteen bytes for the next uuid; the caller sets version and variant."""
        self.used.add("uuid")
        self._uuid_calls += 1
        return self._bytes("uuid", self._uuid_calls, 16)

    def _bytes(self, label: str, count: int, size: int) -> bytes:
        key = derive(self.seed, "uuid", 0)
        return hashlib.shake_256(b"dsec.%b.1\n%d\n%d" % (label.encode(), key, count)).digest(size)

    # -- snapshots: plain and numpy values, so that any anchor can carry them

    def get_state(self) -> dict[str, Any]:
        """All that the future draws depend on, copied."""
        return {
            "seed": self.seed,
            "position": self.position,
            "reads": self._reads,
            "slept_ns": self._slept_ns,
            "last_ns": self._last_ns,
            "urandom_calls": self._urandom_calls,
            "uuid_calls": self._uuid_calls,
            "used": sorted(self.used),
            "random": None if self._random is None else _random_state(self._random),
            "numpy": None if self._numpy is None else self._numpy.get_state(legacy=False),
            "torch": self._torch_bytes(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was taken."""
        self.seed = int(state["seed"])
        self.position = int(state["position"])
        self._reads = int(state["reads"])
        self._slept_ns = int(state["slept_ns"])
        self._last_ns = int(state["last_ns"])
        self._urandom_calls = int(state["urandom_calls"])
        self._uuid_calls = int(state["uuid_calls"])
        self.used = set(state["used"])
        self._random = None
        if state["random"] is not None:
            saved = state["random"]
            self._random = random.Random(0)
            words = tuple(int(word) for word in saved["words"])
            self._random.setstate((int(saved["version"]), words, saved["gauss_next"]))
        self._numpy = None
        if state["numpy"] is not None:
            import numpy as np

            self._numpy = np.random.RandomState(np.random.MT19937(0))
            self._numpy.set_state(state["numpy"])
        self._set_torch_bytes(state["torch"])

    def _torch_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        if self.torch_loaded is not None:
            return self.torch_loaded.read()
        if self.torch_state is None:
            return None
        import numpy as np

        return np.asarray(self.torch_state, dtype=np.uint8).copy()

    def _set_torch_bytes(self, saved: Any) -> None:
        self.torch_state = None
        if saved is not None:
            import numpy as np

            self.torch_state = np.array(saved, dtype=np.uint8)
        if self.torch_loaded is not None:
            if self.torch_state is None:
                raise ValueError("a state without torch cannot be set while torch is swapped in")
            self.torch_loaded.write(self.torch_state)


def _random_state(generator: random.Random) -> dict[str, Any]:
    import numpy as np

    version, words, gauss_next = generator.getstate()
    return {
        "version": version,
        "words": np.array(words, dtype=np.uint32),
        "gauss_next": gauss_next,
    }


class Slot(threading.local):
    """The `Chance` that this thread's user code runs under, or ``None`` outside user code."""

    chance: Chance | None = None


slot: Final = Slot()


def activate(chance: Chance) -> None:
    """From here on, this thread's user code is the session of ``chance``."""
    slot.chance = chance


def deactivate(_: Chance | None = None) -> None:
    """User code has returned: clocks and entropy are the process's own again."""
    slot.chance = None


def current() -> Chance | None:
    """The active `Chance` of this thread."""
    return slot.chance
