"""How user code makes a session stop: what it raises, or what it returns that cannot be, as a code.

Everything that a machine runs of user code, it runs in a way that ends here. `MemoryError` alone
passes, since nobody can tell whose memory it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsec.session.adapters.gymnasium import EnvError
from dsec.session.adapters.readable import StateError
from dsec.session.raised import is_ours, told, type_name
from dsec.session.tools import CallsInvalid, CallsTooLarge
from dsec_contracts.canonical import CanonicalError, encode

ACTION_INVALID, ENV_RAISED = "action_invalid", "env_raised"
OWN_CODES = frozenset(
    (
        *("agent_raised", "agent_invalid", ACTION_INVALID, ENV_RAISED, "env_invalid"),
        *("too_large", "tool_turns_max"),
    )
)
"""The codes of failures that the machine itself finds, and finds again when it is re-executed.
Beside these only a fatal notice about a reward fails a session from within."""
FORMERLY = {ACTION_INVALID: ENV_RAISED}
"""Codes, and what logs call the same end that are older than they."""


class Stop(Exception):
    """The session ends here: a failure with a code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def stop_of(code: str, error: BaseException) -> Stop:
    """The end that an error makes of a session: `code`, unless it is one of ours that has its own.
    What user code raises is user code's, whatever its class."""
    if not is_ours(error):
        return Stop(code, told(error))
    match error:
        case Stop():
            return error
        case EnvError():
            return Stop(error.code, str(error))
        case StateError():
            return Stop("env_invalid", str(error))
        case CallsTooLarge():
            return Stop("too_large", str(error))
        case CallsInvalid():
            return Stop("agent_invalid", str(error))
    return Stop(code, told(error))


def run_user(code: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call user code.

    Raises:
        Stop: whatever it raised, with `code`.
        MemoryError: there is no more.
    """
    try:
        return call(*args)
    except MemoryError:
        raise
    except BaseException as error:
        raise stop_of(code, error) from error


def encoded(code: str, what: str, value: Any) -> bytes:
    """The canonical bytes of a value that user code gave.

    Raises:
        Stop: it has none, or a mapping of the user's own class raises.
    """
    try:
        return encode(value)
    except MemoryError:
        raise
    except BaseException as error:  # a mapping of the user's own class is user code
        if is_ours(error) and isinstance(error, CanonicalError):
            raise Stop(code, f"{what} cannot be recorded: {error}") from error
        raise stop_of(code, error) from error


def short(value: Any) -> str:
    """A value that user code gave, for people, without asking it anything."""
    if type(value) in (str, int, float, type(None)):
        return repr(value)[:80]
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    return type_name(value)


def is_dict(value: Any) -> bool:
    """As `isinstance`, which asks the value itself what it is, and that is user code."""
    return issubclass(type(value), dict)
