"""Which session's code runs now, where its supervisor can read it after the worker's death.

A small shared memory: the running slot (session index, step, since when), a word that says "out of
memory", who started a process last and at which step, and a table of session ids and step deadlines
by index.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import UUID

from dsec.platform.parent import die_with_parent

_INDEX, _STEP, _SINCE = 0, 1, 2
"""The slot is three words, each stored at once: packing them together writes zeroes first, and a
reader in another process would see a step that began at time 0."""
_ROW = struct.Struct("<16sd")  # session id, step deadline in seconds
_OOM_AT = 32
_STARTER = struct.Struct("<q16s")  # step, session id
_STARTER_AT = 40
_TABLE_AT = 64
NOBODY = -1
FORKED: list[int] = []
"""Not empty in a process that user code forked from a worker. Where its code comes back from the
step it must end at once: it has the worker's connections, and its name."""


def _note_fork() -> None:
    FORKED.append(os.getpid())
    die_with_parent()  # which the kernel forgets at a fork


os.register_at_fork(after_in_child=_note_fork)
EXIT_FENCED = 75
EXIT_OUT_OF_MEMORY = 76


@dataclass(frozen=True, slots=True)
class Running:
    """What ran when it was read."""

    session_id: UUID
    step: int
    since_ns: int
    step_deadline_s: float


@dataclass(frozen=True, slots=True)
class Starter:
    """Whose code started a process, and at which step."""

    session_id: UUID
    step: int


class RunningSlot:
    """The shared memory of one worker."""

    def __init__(self, path: Path, rows: int, *, create: bool) -> None:
        self.path = path
        size = _TABLE_AT + rows * _ROW.size
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
            self._slot = memoryview(self._map)[:24].cast("q")
        finally:
            os.close(descriptor)
        if create:
            self.clear()

    def assign(self, index: int, session_id: UUID, step_deadline_s: float) -> None:
        """Say which session an index stands for."""
        _ROW.pack_into(self._map, _TABLE_AT + index * _ROW.size, session_id.bytes, step_deadline_s)

    def enter(self, index: int, step: int, now_ns: int) -> None:
        """User code of a session runs from now on."""
        slot = self._slot
        slot[_SINCE] = now_ns
        slot[_STEP] = step
        slot[_INDEX] = index

    def clear(self) -> None:
        """No user code runs."""
        self._slot[_INDEX] = NOBODY

    def note_start(self) -> None:
        """User code is about to start a process, and that could end this one."""
        index, step, _ = self._slot
        if index != NOBODY:
            raw, _ = _ROW.unpack_from(self._map, _TABLE_AT + index * _ROW.size)
            _STARTER.pack_into(self._map, _STARTER_AT, step, raw)

    def starter(self) -> Starter | None:
        """Whose code started a process last, if any did."""
        step, raw = _STARTER.unpack_from(self._map, _STARTER_AT)
        return Starter(UUID(bytes=raw), step) if any(raw) else None

    @property
    def last_step(self) -> int:
        """The step at which user code ran last, whosever it was."""
        return self._slot[_STEP]

    def end_out_of_memory(self) -> NoReturn:
        """Where user code gets no more memory the process ends at once, saying so.

        The session that asked last need not be the one that took it all, so none is blamed here:
        the slot still names it, and it is tried alone.
        """
        self._map[_OOM_AT] = 1
        os._exit(EXIT_OUT_OF_MEMORY)

    def end_if_forked(self) -> None:
        """After user code: whoever came back may be a copy of this process."""
        if FORKED:
            os._exit(0)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the worker said so."""
        return self._map[_OOM_AT] == 1

    def read(self) -> Running | None:
        """What runs, or ran when the worker died."""
        index, step, since_ns = self._slot
        if index == NOBODY:
            return None
        raw, deadline_s = _ROW.unpack_from(self._map, _TABLE_AT + index * _ROW.size)
        return Running(UUID(bytes=raw), step, since_ns, deadline_s)

    def close(self, *, remove: bool = False) -> None:
        """Unmap, and remove the file."""
        self._slot.release()
        self._map.close()
        if remove:
            self.path.unlink(missing_ok=True)
