"""One call: its arguments checked against the tool's schema, the tool run, its output measured.

All of this happens in a calling process and under the call's deadline. The schema too is the
user's: a pattern in it can take for ever on an argument that a model wrote.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry

from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError
from dsec.session.documents import SpecError, ToolDocument, unseal
from dsec.session.fitting import misfit, promise
from dsec.session.raised import is_ours, told, type_name
from dsec.tool.frames import Failure, Order, Outcome, Refused
from dsec_contracts.canonical import CanonicalError, encode

MESSAGE_CHARS_MAX = 4_000
KEY_ARGUMENT = "idempotency_key"
"""A Python tool that has a parameter of this name is given the key of the call in it."""

_SERVER_GONE = ("mcp_broken", "mcp_unreachable", "output_too_large")
"""Failures after which an MCP server that was started may have left something running."""

Function = Callable[[dict[str, Any], str], Any]
"""From arguments and idempotency key to what the tool returns."""


class Tool:
    """A tool that is loaded."""

    def __init__(self, document: ToolDocument, function: Function) -> None:
        self._document = document
        self._function = function
        # Without a registry a schema could have this process fetch what it refers to.
        self._schema = Draft202012Validator(document.parameters, registry=Registry())

    @property
    def runs_user_code(self) -> bool:
        """Whether the tool's own code runs in this process, and not in its server's."""
        return self._document.kind == "python"

    def is_spent_by(self, outcome: Outcome) -> bool:
        """Whether what the tool has started may be in any state after a call that ended so."""
        return bool(self._document.command) and (
            isinstance(outcome, Failure) and outcome.code in _SERVER_GONE
        )

    def call(self, order: Order) -> Outcome:
        """Make a call. Whatever the tool does, this returns."""
        try:
            arguments = self._arguments(order.arguments)
            result = self._function(arguments, order.key)
            return result if isinstance(result, Failure) else self._output(result)
        except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
            if is_ours(error) and isinstance(error, Refused):
                # A server's own words may be in it, as many as it likes.
                told = error.failure.message[:MESSAGE_CHARS_MAX]
                return replace(error.failure, message=told)
            return Failure("tool_raised", _told(error), _retryable(error))

    def _arguments(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(_invalid(f"the arguments are no JSON: {error}")) from error
        if not isinstance(found, dict):
            raise Refused(_invalid("the arguments are no JSON object"))
        wrong = best_match(self._schema.iter_errors(found))
        if wrong is not None:
            raise Refused(_invalid(f"arguments{wrong.json_path[1:]}: {wrong.message}"))
        return found

    def _output(self, value: Any) -> bytes:
        try:
            content = encode(value)
        except CanonicalError as error:
            if not is_ours(error):
                raise
            why = f"what the tool returned cannot be recorded: {error}"
            raise Refused(Failure("result_invalid", why[:MESSAGE_CHARS_MAX])) from error
        most = self._document.output_bytes_max
        if len(content) > most:
            why = f"the tool returned {len(content)} bytes; its output_bytes_max is {most}"
            raise Refused(Failure("output_too_large", why))
        return content


def load(
    spec_hash: str, content: bytes, secrets: Mapping[str, str], waits: int | None = None
) -> Tool | Failure:
    """Load a tool; a failure is that of every call of it.

    Args:
        waits: a pipe that ends when nobody waits for a call any more.
    """
    try:
        document, files = unseal(content, "tool")
        assert isinstance(document, ToolDocument)
        return Tool(document, _function(document, spec_hash, files, secrets, waits))
    except Refused as refused:
        return refused.failure
    except SpecError as error:
        return Failure("tool_load_failed", str(error)[:MESSAGE_CHARS_MAX])
    except CodeError as error:
        return Failure("tool_load_failed", error.message[-MESSAGE_CHARS_MAX:])


def _function(
    document: ToolDocument,
    spec_hash: str,
    files: Mapping[str, bytes],
    secrets: Mapping[str, str],
    waits: int | None,
) -> Function:
    # Imported here: each costs more to load than most tools.
    if document.kind == "python":
        return _python(CodeNamespace(spec_hash, files).load(document.entry), document.parameters)
    if document.kind == "openai":
        from dsec.tool.model_request import complete

        return _ours(lambda given, key: complete(document, given, key, secrets))
    if document.kind == "mcp":
        try:
            from dsec.tool.mcp_server import connect
        except ImportError as missing:
            why = f"kind: mcp needs the MCP client ({missing}): pip install 'dsec[mcp]'"
            raise Refused(Failure("tool_load_failed", why)) from missing
        return _ours(connect(document, spec_hash, files, secrets, waits))
    from dsec.tool.http_request import request

    return _ours(lambda given, key: request(document, given, key, secrets))


def _ours(function: Function) -> Function:
    """A function with no user code in it: its refusals are ours, whatever libraries they came
    through."""

    def call(arguments: dict[str, Any], key: str) -> Any:
        try:
            return function(arguments, key)
        except Refused as refused:
            failure = refused.failure
        raise Refused(failure)

    return call


def _python(function: Any, parameters: Mapping[str, Any]) -> Function:
    """A Python function, plain or `async def`, called with the arguments by name."""
    if (why := misfit(function, parameters, KEY_ARGUMENT)) is not None:
        raise Refused(
            Failure("declaration_misfit", f"the function is not what its spec says: {why}")
        )
    try:
        wants_key = KEY_ARGUMENT in inspect.signature(function).parameters
    except Exception:  # noqa: BLE001 - no function, which its call will say, or one without names
        wants_key = False

    def call(arguments: dict[str, Any], key: str) -> Any:
        given = arguments | {KEY_ARGUMENT: key} if wants_key else arguments
        result = function(**given)
        if (what := promise(result)) is not None:
            # Nobody would hear of it: what a call returns is all there is.
            return Failure(
                "declaration_misfit",
                f"the tool returned {what}: wait for it in the tool, or `async def` it",
            )
        if not inspect.isawaitable(result):
            return result
        result, error = asyncio.run(_awaited(result))
        if error is not None:
            raise error
        return result

    return call


async def _awaited(result: Any) -> tuple[Any, BaseException | None]:
    # The loop must not see the error: one that cannot be told breaks it for later calls too.
    try:
        return await result, None
    except BaseException as error:  # noqa: BLE001 - raised again outside
        return None, error


def _invalid(message: str) -> Failure:
    # Not retryable: the same arguments will not do better.
    return Failure("arguments_invalid", message[:MESSAGE_CHARS_MAX])


def _retryable(error: BaseException) -> bool:
    """Whether the tool's own error says that another call might do better."""
    try:
        return getattr(error, "retryable", False) is True
    except BaseException:  # noqa: BLE001 - an attribute may be user code
        return False


def _told(error: BaseException) -> str:
    text, name = told(error, MESSAGE_CHARS_MAX), type_name(error)
    if name not in text:  # its message is so long that nothing else was left
        text = f"{name}: ...{text}"
    return text.encode("utf-8", "backslashreplace").decode()
