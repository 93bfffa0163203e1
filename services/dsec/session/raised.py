"""What user code raises: told apart from what is raised here, and told to people.

User code can raise any class, those of ours that mean something included, and may do so by calling
us. So a class says nothing. What tells is the way that an error came: one of ours has passed
through nobody else's code between whoever raised it and whoever catches it.

Nothing here trusts an error to be told: its text, its notes and its causes may be user code too.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any, Final

MESSAGE_CHARS_MAX: Final = 8_000
LINE_CHARS_MAX: Final = 500
NAME_CHARS_MAX: Final = 80
FRAMES_MAX: Final = 12

_OURS: Final = ("dsec.", "dsec_contracts.")
_NOT_OURS: Final = "dsec.examples"
# As the interpreter sees them: a class may define attributes of these names anew.
_TRACEBACK: Final = vars(BaseException)["__traceback__"].__get__
_NAME: Final = vars(type)["__name__"].__get__


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised here, and came here without passing through other code."""
    trace: TracebackType | None = _TRACEBACK(error)
    while trace is not None:
        module = dict.get(trace.tb_frame.f_globals, "__name__")
        if type(module) is not str or not module.startswith(_OURS) or module == _NOT_OURS:
            return False
        trace = trace.tb_next
    return True


def told(error: BaseException, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """An error and its traceback, for people; of more than `chars_max` the end.

    Raises:
        MemoryError: there is no more.
    """
    try:
        return "".join(traceback.format_exception(error, limit=-FRAMES_MAX))[-chars_max:]
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - user code again
        return _untellable(error)


def told_in_a_line(error: BaseException, chars_max: int = LINE_CHARS_MAX) -> str:
    """An error without its traceback, for people.

    Raises:
        MemoryError: there is no more.
    """
    try:
        return "".join(traceback.format_exception_only(error)).strip()[:chars_max]
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - user code again
        return _untellable(error)


def type_name(value: Any) -> str:
    """The name of a value's class, whatever its metaclass says."""
    name: str = _NAME(type(value))
    return name[:NAME_CHARS_MAX]


def _untellable(error: BaseException) -> str:
    return f"{type_name(error)}, which raises when it is told"
