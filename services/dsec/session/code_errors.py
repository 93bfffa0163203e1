"""What goes wrong when user code is loaded, told to the user in terms of the user's own code.

The traceback is cut to the shipped files: the frames of the loader, the import machinery and the
libraries below say nothing about the user's mistake, and their paths differ between machines.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from dsec.session.raised import is_ours, told_in_a_line

TRACEBACK_CHARS_MAX: Final = 16_000
_OURS: Final = ("<frozen importlib", "<frozen runpy")

Code = Literal["module_not_found", "attribute_not_found", "import_failed", "bad_entry"]


class CodeError(Exception):
    """User code could not be loaded. ``code`` is stable, ``field`` names the spec's field."""

    def __init__(self, code: Code, field: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: Code = code
        self.field = field
        self.message = message


@contextmanager
def telling(field: str, shipped: str | None) -> Iterator[None]:
    """Turn whatever user code raises into a `CodeError`, ``SystemExit`` and the like included."""
    try:
        yield
    except BaseException as error:  # user code must not be able to end the worker
        if is_ours(error) and isinstance(error, CodeError):
            raise
        raise _import_failed(field, error, shipped) from None


def _import_failed(field: str, error: BaseException, shipped: str | None) -> CodeError:
    """``error``, raised while user code ran, with the traceback of the files below ``shipped``.

    Without ``shipped`` the code is an installed module, and all frames but the machinery's stay.
    """
    text = _text(error, shipped)
    if len(text) > TRACEBACK_CHARS_MAX:
        half = TRACEBACK_CHARS_MAX // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return CodeError("import_failed", field, text)


def _text(error: BaseException, shipped: str | None) -> str:
    try:
        told = traceback.TracebackException.from_exception(error)
        _cut(told, shipped)
        return "".join(told.format())
    except BaseException:  # noqa: BLE001 - its notes and its causes may be user code too
        return told_in_a_line(error)


def _cut(told: traceback.TracebackException, shipped: str | None) -> None:
    seen: set[int] = set()
    waiting = [told]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        frames = [frame for frame in one.stack if _is_user(frame.filename, shipped)]
        one.stack = traceback.StackSummary.from_list(frames)
        chained = (one.__cause__, one.__context__, *(one.exceptions or ()))
        waiting += [other for other in chained if other is not None]


def _is_user(filename: str, shipped: str | None) -> bool:
    if shipped is not None:
        return filename.startswith(shipped + "/")
    machinery = filename.startswith(_OURS) or filename.endswith("importlib/__init__.py")
    return not machinery and not filename.endswith("dsec/session/code.py")
