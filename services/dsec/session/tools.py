"""Tool calls as the session machine sees them: what an agent asks for, and the answers in order.

A *turn* is all the calls of one decision. Whoever makes the calls may answer in any order and more
than once; the agent hears each answer once, in the order of the calls, so that two runs hear the
same.

Arguments are not checked against the tool's schema here but by the service that makes the call: its
verdict is an answer, which is recorded, so no replay depends on the version of a validator, and a
model that wrote a bad argument is told so and may try again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from dsec.session.io import Call, Called, Input
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, decode
from dsec_contracts.keys import CALLS_PER_TURN_MAX
from dsec_contracts.tool import ToolCall, ToolCalledFact, ToolFunction

TURN_BYTES_MAX = 400_000
"""Names and arguments of one turn."""
_CALL_KEYS = frozenset(("id", "type", "function", "index"))
_FUNCTION_KEYS = frozenset(("name", "arguments"))


class CallsInvalid(ValueError):
    """What an agent returned as `tool_calls` cannot be called. Says which one, and why."""


class CallsTooLarge(CallsInvalid):
    """Names and arguments of a turn have more than `TURN_BYTES_MAX` bytes."""


def calls_of(
    decision: Mapping[str, Any], step: int, turn: int, names: Iterable[str]
) -> tuple[Call, ...]:
    """The calls of a decision, empty for none.

    Each is OpenAI's `{"type": "function", "function": {"name": ..., "arguments": ...}}` or the
    inner mapping alone; arguments are JSON text, or a mapping. An id that the agent gives is not
    used: ids are derived, since those of models are random.

    Raises:
        CallsInvalid: see there.
    """
    given = decision.get("tool_calls")
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        raise CallsInvalid(f"tool_calls must be a list, not {type(given).__name__}")
    if len(given) > CALLS_PER_TURN_MAX:
        raise CallsInvalid(f"{len(given)} tool calls; one decision may have {CALLS_PER_TURN_MAX}")
    known = tuple(names)
    # A list of the user's own class may yield more than its length says.
    some = itertools.islice(given, CALLS_PER_TURN_MAX)
    calls = tuple(_call(one, keys.call_id(step, turn, n), known) for n, one in enumerate(some))
    size = sum(len(call.name) + len(call.arguments.encode()) for call in calls)
    if size > TURN_BYTES_MAX:
        raise CallsTooLarge(
            f"the arguments of the tool calls have {size} bytes; they may have {TURN_BYTES_MAX}"
        )
    return calls


def _call(given: Any, id_: str, known: tuple[str, ...]) -> Call:
    if not isinstance(given, Mapping):
        raise CallsInvalid(f"{id_}: a tool call must be a mapping, not {type(given).__name__}")
    function = given
    if "function" in given:
        function = given["function"]
        if given.get("type", "function") != "function":
            raise CallsInvalid(f"{id_}: `type` must be `function`")
        _only(given, _CALL_KEYS, id_)
    if not isinstance(function, Mapping):
        raise CallsInvalid(f"{id_}: `function` must be a mapping of `name` and `arguments`")
    _only(function, _FUNCTION_KEYS if function is not given else _FUNCTION_KEYS | _CALL_KEYS, id_)
    name = function.get("name")
    if isinstance(name, str):
        # Text of the user's own class may say that it equals what it does not.
        name = str.__str__(name)
    if not isinstance(name, str) or name not in known:
        raise CallsInvalid(
            f"{id_}: no tool is called {str(name)[:64]!r}; the agent declares "
            f"{', '.join(known) or 'none'}"
        )
    return Call(id_, name, _arguments(function.get("arguments"), id_))


def _only(given: Mapping[str, Any], known: frozenset[str], id_: str) -> None:
    if unknown := [key for key in given if key not in known]:
        raise CallsInvalid(f"{id_}: {str(unknown[0])[:64]!r} is no key of a tool call")


def _arguments(given: Any, id_: str) -> str:
    if given is None:
        return "{}"
    if not isinstance(given, str):
        if not isinstance(given, Mapping):
            raise CallsInvalid(f"{id_}: `arguments` must be a mapping or JSON text")
        try:
            given = json.dumps(dict(given), ensure_ascii=False, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CallsInvalid(f"{id_}: `arguments` are no JSON: {error}") from error
    text = str.__str__(given)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CallsInvalid(f"{id_}: `arguments` are no Unicode text: {error.reason}") from error
    return text


def called_fact(session_id: UUID, turn: Called) -> ToolCalledFact:
    """The fact of a turn."""
    return ToolCalledFact(
        session_id=session_id,
        step=turn.step,
        turn=turn.turn,
        inputs=turn.inputs,
        calls=[
            ToolCall(id=id_, function=ToolFunction(name=name, arguments=arguments))
            for id_, name, arguments in turn.calls
        ],
        turn_hash=turn.turn_hash,
    )


class Answers:
    """The answers to the calls of one turn that block. Each counts once, and is due when all before
    it were heard."""

    __slots__ = ("_awaited", "_first", "_held", "_next", "called")

    def __init__(self, turn: Called, awaited: Sequence[int]) -> None:
        """`awaited`: the places of the calls that block, in order, one at least."""
        self.called = turn
        self._awaited = awaited
        self._first = keys.call_ordinal(turn.step, turn.turn, 0)
        self._held: dict[int, Input] = {}
        self._next = 0

    @classmethod
    def of(cls, turn: Called, late: frozenset[str]) -> Answers | None:
        """Those to a turn's calls of tools that are not `late`. None: no call blocks."""
        awaited = [n for n, call in enumerate(turn.calls) if call.name not in late]
        return cls(turn, awaited) if awaited else None

    def offer(self, given: Input) -> None:
        """Keep an answer until it is due. What is stale, foreign or repeated changes nothing."""
        index = given.ordinal - self._first
        if index in self.awaited and given.cause == self.called.turn_hash:
            self._held.setdefault(index, given)

    def due(self) -> tuple[str, Input] | None:
        """The next answer and the id of its call, or None."""
        if self.complete:
            return None
        index = self._awaited[self._next]
        given = self._held.pop(index, None)
        if given is None:
            return None
        self._next += 1
        return self.called.calls[index].id, given

    @property
    def awaited(self) -> Sequence[int]:
        """The places of the calls whose answers were not heard yet."""
        return self._awaited[self._next :]

    @property
    def complete(self) -> bool:
        """Whether all were heard."""
        return self._next == len(self._awaited)

    @property
    def last_key(self) -> str:
        """The key of the last answer."""
        return keys.tool_result(self.called.step, self.called.turn, self._awaited[-1])


def result_of(given: Input) -> Any:
    """What the agent is told: what the tool returned, or `{"error": {...}}`."""
    try:
        value = decode(given.content)
        if not given.code:
            return value
        message, retryable = value
    except (CanonicalError, TypeError, ValueError):
        # Nobody but the tool service writes these; whoever did, both runs are told the same.
        return {"error": {"code": "result_invalid", "message": "", "retryable": False}}
    return {"error": {"code": given.code, "message": message, "retryable": retryable}}
