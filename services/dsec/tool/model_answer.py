"""What is recorded of a model's answer: the same whether it came whole or in pieces.

Everything the server says is kept (token ids, log-probabilities, usage, the model's version), but
for what is of the answer and not of its content: its id, its times, what was in the server's cache.
They would give each of ten equal sessions another chain. The ids of the tool calls that a model
asks for are random too; here they follow from what was asked and what is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable
from typing import Any

from dsec.tool.http_exchange import fail
from dsec_contracts.canonical import CanonicalError, encode

_NAMING = frozenset(("id", "created", "object", "timings"))
_CACHED = "cached_tokens"
_WHOLE = frozenset(("role", "id", "type", "object", "name", "finish_reason", "stop_reason"))
"""Texts that come whole: later ones stand in the place of earlier ones."""
_KEPT_NULL = frozenset(("content", "finish_reason"))
CHOICES_MAX = 128


async def folded(pieces: AsyncIterable[Any]) -> dict[str, Any]:
    """The whole answer from the pieces of a stream, as if it had come at once.

    Raises:
        Refused: a piece is none, or tells of an error.
    """
    whole: dict[str, Any] = {}
    async for piece in pieces:
        if not isinstance(piece, dict):
            fail("result_invalid", f"a piece of the stream is {type(piece).__name__}, no object")
        if (error := piece.get("error")) is not None:
            fail("model_error", str(error), retryable=True)
        for name, value in piece.items():
            if name == "choices" and isinstance(value, list):
                try:
                    whole["choices"] = _by_index(whole.get("choices", []), value)
                except RecursionError:
                    fail("result_invalid", "a piece of the stream is nested too deeply")
            elif value is not None or name not in whole:
                whole[name] = value
    choices = whole.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and "delta" in choice:
            choice["message"] = choice.pop("delta")
    return whole


def _by_index(kept: Any, pieces: list[Any]) -> list[dict[str, Any]]:
    """Pieces of a list whose entries say their places, added to what came of it before."""
    if not isinstance(kept, list) or not all(isinstance(one, dict) for one in kept):
        fail("result_invalid", "the stream goes on with a list where it began something else")
    for piece in pieces:
        if not isinstance(piece, dict):
            fail("result_invalid", "the stream has an entry of a list that is no object")
        index = piece.get("index", 0)
        if type(index) is not int or not 0 <= index < CHOICES_MAX or index > len(kept):
            fail("result_invalid", f"the stream skips to index {index!r}")
        if index == len(kept):
            kept.append({})
        elif _begins_another(kept[index], piece):
            fail("result_invalid", f"the stream has two tool calls of one index, {index}")
        _add(kept[index], piece)
    return kept


def _name_of(call: dict[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _begins_another(kept: dict[str, Any], piece: dict[str, Any]) -> bool:
    """Whether a piece is of another tool call than what was kept: added up they would be one that
    nobody asked for."""
    ids = kept.get("id"), piece.get("id")
    return bool(all(ids) and ids[0] != ids[1] and _name_of(kept) and _name_of(piece))


def _add(kept: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        before = kept.get(name)
        if value is None or before is None:
            if value is not None or name not in kept:
                kept[name] = _begun(value)
        elif isinstance(before, str) and isinstance(value, str) and name not in _WHOLE:
            kept[name] = before + value
        elif isinstance(before, dict) and isinstance(value, dict):
            _add(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            if any(isinstance(one, dict) and "index" in one for one in value):
                _by_index(before, value)
                continue
            if name == "tool_calls" and any(isinstance(o, dict) and not _name_of(o) for o in value):
                fail("result_invalid", "a piece of a tool call says neither its index nor its name")
            before.extend(value)
        elif before and isinstance(before, (str, list, dict)) and name not in _WHOLE:
            told = f"{type(before).__name__} and then as {type(value).__name__}"
            fail("result_invalid", f"the stream gives {name[:64]} first as {told}")
        else:
            kept[name] = value


def _begun(value: Any) -> Any:
    """The first piece, as something that the next can be added to."""
    if isinstance(value, list):
        if any(isinstance(one, dict) and "index" in one for one in value):
            return _by_index([], value)
        return list(value)
    if isinstance(value, dict):
        kept: dict[str, Any] = {}
        _add(kept, value)
        return kept
    return value


def recorded(answer: Any, asked: dict[str, Any], api: str) -> dict[str, Any]:
    """What is recorded of a whole answer.

    Raises:
        Refused: it is no answer of such a server.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        fail("result_invalid", "the server's answer has no choices")
    key = "message" if api == "chat" else "text"
    told = {name: value for name, value in answer.items() if name not in _NAMING}
    if isinstance(usage := told.get("usage"), dict):
        told["usage"] = {name: _uncached(value) for name, value in usage.items()}
    told["choices"] = [_choice(one, key, asked, n) for n, one in enumerate(choices)]
    return told


def _uncached(value: Any) -> Any:
    """Of a count that has parts, those that do not depend on who asked before."""
    if not isinstance(value, dict):
        return value
    return {name: count for name, count in value.items() if name != _CACHED}


def _choice(choice: Any, key: str, asked: dict[str, Any], place: int) -> dict[str, Any]:
    if not isinstance(choice, dict) or not isinstance(
        choice.get(key), dict if key == "message" else str
    ):
        fail("result_invalid", f"choice {place} of the server's answer has no {key}")
    told = _without_nulls(choice)
    if key == "message":
        message = told["message"] = _without_nulls(choice["message"])
        # A stream begins with an empty text, also where none follows.
        message["content"] = message.get("content") or None
        if "tool_calls" in message:
            message["tool_calls"] = _calls(message["tool_calls"], asked, place)
    return told


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    # Servers leave out in pieces what they send as null in whole answers.
    return {n: v for n, v in value.items() if v is not None or n in _KEPT_NULL}


def _calls(calls: Any, asked: dict[str, Any], place: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        fail("result_invalid", f"tool_calls of choice {place} are no list of objects")
    told = []
    for n, call in enumerate(calls):
        what = {name: value for name, value in call.items() if name not in ("id", "index")}
        try:
            digest = hashlib.sha256(encode([asked, place, n, what])).hexdigest()
        except CanonicalError as error:
            fail("result_invalid", f"tool_calls of choice {place} cannot be recorded: {error}")
        told.append({"id": f"call_{digest[:24]}", "type": "function"} | what)
    return told
