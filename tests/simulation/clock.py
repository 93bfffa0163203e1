"""Virtual time: an event loop that never waits, processes that can be stopped, and their clocks.

Nothing here sleeps. When no callback is ready the loop sets its clock to the next timer's time, so
a minute of the services' time costs what their callbacks cost. Every callback belongs to the
process in whose context it was made; those of a process that is stopped are kept instead of run,
which is what SIGSTOP and SIGKILL do: no `except`, no `finally`, no last word.

Order follows from the seed alone: timers are kept by time and then by the order in which they were
set, and tasks and futures hash by number, since asyncio keeps them in sets.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import sys
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, TypeVarTuple

import tenacity.wait

from dsec.platform import clock, permits

START = datetime(2026, 1, 1, tzinfo=UTC)
START_NS = int(START.timestamp()) * 1_000_000_000
CALLBACKS_MAX = 400_000
"""A run that needs more is in a circle."""

Given = TypeVarTuple("Given")
Done = TypeVar("Done")


class Stuck(Exception):
    """Nothing is ready and nothing is due: the run can never end."""


class Process:
    """What runs as one process: its callbacks run, are held back, or are lost with it."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.stopped = False
        self.dead = False
        self.mute_until_s = 0.0
        """Until then nobody hears its heartbeats, though it is well."""
        self.deaf_until_s = 0.0
        """Until then what is sent to it gets lost, as on a connection that is half open."""
        self.limbo: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.on_death: list[Callable[[], None]] = []
        """What the world does when it dies: connections break, locks are given up."""

    def __repr__(self) -> str:
        return self.name

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self, loop: VirtualLoop) -> None:
        """SIGCONT: what came meanwhile is there at once."""
        if not self.dead:
            self.stopped = False
            loop.run_soon(self.limbo)
            self.limbo = []

    def die(self) -> None:
        """SIGKILL, or the end of a process that ended by itself."""
        if not self.dead:
            self.dead = self.stopped = True
            for tell in self.on_death:
                tell()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
_NOBODY = Context()


class _Task(asyncio.Task):  # type: ignore[type-arg]
    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future):  # type: ignore[type-arg]
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Its clock begins at 0; the wall clock at `START`."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.callbacks = 0

    def time(self) -> float:
        """Seconds since the run began."""
        return self._now_s

    @property
    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return START_NS + int(self._now_s * 1e9)

    @property
    def now(self) -> datetime:
        """The wall clock."""
        return START + timedelta(microseconds=int(self._now_s * 1e6))

    # -- what asyncio asks of a loop -----------------------------------------------------------

    def create_task(
        self,
        coro: Any,
        *,
        name: Any = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task = _Task(next(self._numbers), coro, loop=self, name=name, context=context)
        owner = PROCESS.get() if context is None else context.get(PROCESS)
        if owner is not None:
            owner.tasks.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self._numbers), self)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over when it is due

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Given], Done], *args: *Given
    ) -> asyncio.Future[Done]:
        """There is one thread. A call in another is made here and now."""
        done: asyncio.Future[Done] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done

    def _write_to_self(self) -> None:
        pass

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        """Have handles run that were held back."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Stuck(f"nothing is due after {self._now_s:.3f} s")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            owner = handle._context.get(PROCESS)
            if owner is not None and owner.stopped:
                owner.limbo.append(handle)
            else:
                self.callbacks += 1
                handle._run()
        if self.callbacks > CALLBACKS_MAX:
            raise Stuck(f"{CALLBACKS_MAX} callbacks, and {self._now_s:.3f} s have passed")

    # -- processes -----------------------------------------------------------------------------

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """The first task of a process."""
        context = _NOBODY.copy()
        context.run(PROCESS.set, process)
        return self.create_task(work, context=context)

    def later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have the world itself do something: no process can stop it."""
        self.call_later(delay_s, call, *arguments, context=_NOBODY.copy())

    def bury(self, processes: list[Process]) -> None:
        """End every task there is, so that none is left to be collected in its midst."""
        tasks = [task for process in processes for task in process.tasks if not task.done()]
        for process in processes:
            process.stopped = False
            self.run_soon(process.limbo)
            process.limbo = []
        tasks += [task for task in asyncio.all_tasks(self) if not task.done()]
        for _ in range(50):
            left = [task for task in tasks if not task.done()]
            if not left:
                break
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.cancel()
            with contextlib.suppress(Stuck):
                for _ in range(5):
                    self.call_soon(lambda: None)
                    self.run_until_complete(_breathe())
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # it is known, or nobody's any more


async def _breathe() -> None:
    await asyncio.sleep(0)


# -- clocks of modules -------------------------------------------------------------------------


class _Now:
    """Whose clock is asked: one run is made after the other."""

    loop: VirtualLoop
    chance: random.Random


_VIRTUAL: dict[Any, Callable[[], Any]] = {
    time.monotonic: lambda: float(_Now.loop.time()),
    time.monotonic_ns: lambda: int(_Now.loop.time() * 1e9),
    time.time: lambda: _Now.loop.now_ns / 1e9,
    time.time_ns: lambda: _Now.loop.now_ns,
    time.perf_counter: lambda: float(_Now.loop.time()),
    clock.utc_now: lambda: _Now.loop.now,
    clock.now_ns: lambda: _Now.loop.now_ns,
}
_KEPT = ("dsec.platform.virtual", "dsec.session")
"""What redirects clocks for user code keeps the real ones."""
_DRAWS_OF_PERMITS = (permits, "random")
_DRAWS_OF_RETRIES = (tenacity.wait, "random")
_replaced: list[tuple[types.ModuleType, str, Any]] = []


@contextlib.contextmanager
def virtual_clocks(loop: VirtualLoop, chance: random.Random) -> Iterator[None]:
    """Every clock that a module of ours, or the retries, took from the process is the loop's, and
    what they draw is the run's.

    The services ask `time` and `dsec.platform.clock` by names that they imported: all those names
    are found and replaced, so that none can be forgotten here when a module begins to use one.
    Within another use of this, only the loop changes: finding the names takes longer than a run.
    """
    outermost = not _replaced
    _Now.loop, _Now.chance = loop, chance
    try:
        if outermost:
            _replace()
        setattr(*_DRAWS_OF_RETRIES, chance)
        yield
    finally:
        if outermost:
            while _replaced:
                setattr(*_replaced.pop())


def _replace() -> None:
    module = types.SimpleNamespace(**vars(time))
    for real, virtual in _VIRTUAL.items():
        if hasattr(time, real.__name__):
            setattr(module, real.__name__, virtual)
    for name, found in list(sys.modules.items()):
        if not name.startswith(("dsec.", "tenacity")) or name.startswith(_KEPT):
            continue
        for attribute, value in list(vars(found).items()):
            known = isinstance(value, types.BuiltinFunctionType | types.FunctionType)
            ours: object = module if value is time else _VIRTUAL.get(value) if known else None
            if ours is not None:
                _replaced.append((found, attribute, value))
                setattr(found, attribute, ours)
    for drawn in (_DRAWS_OF_PERMITS, _DRAWS_OF_RETRIES):
        _replaced.append((*drawn, getattr(*drawn)))
    setattr(*_DRAWS_OF_PERMITS, types.SimpleNamespace(SystemRandom=lambda: _Now.chance))
