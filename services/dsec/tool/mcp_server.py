"""The `mcp` kind of tool: a tool of an MCP server, through the official client.

The server is one that runs (`url`, streamable HTTP), or one that is started here (`command`). It is
started once a calling process, at the first call, and again when it is gone. Whether it has the
tool, and takes what the spec says, is looked up each time it is connected to: a declaration that
does not fit is a failure with a reason, `declaration_misfit`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import anyio
import mcp
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dsec.platform.secrets import filled, hidden_text
from dsec.session.tool_document import ToolDocument
from dsec.tool.frames import Refused
from dsec.tool.http_exchange import fail, sendable
from dsec.tool.mcp_declared import check_answers, check_declared
from dsec.tool.mcp_http import Heard, http_of
from dsec.tool.mcp_pipes import pipes_of
from dsec.tool.mcp_tasks import Tasks, when_over

log = logging.getLogger(__name__)

TOOL_PAGES_MAX = 100
"""Of a server's list of tools: one that never ends must not look like one that is long."""
LIST_WAIT_S_MAX = 30.0
"""How long a server is waited for that is asked what it has when a tool is registered."""
_GROWTH = 6
"""A JSON text may be so many times longer than what it says."""


def connect(
    document: ToolDocument,
    spec_hash: str,
    files: Mapping[str, bytes],
    secrets: Mapping[str, str],
    waits: int | None = None,
) -> Callable[[dict[str, Any], str], Any]:
    """What makes calls of the tool. Nothing is started or asked before the first.

    Args:
        waits: a pipe that ends when nobody waits for the call any more.
    """
    return _Server(document, spec_hash, files, secrets, waits=waits).call


def listed(
    document: ToolDocument,
    files: Mapping[str, bytes],
    secrets: Mapping[str, str],
) -> mcp.types.Tool:
    """The tool as its server tells of it. The server is asked, and ended.

    Raises:
        Refused: it cannot be reached, or has no such tool. The message ends with what a server
            that was started here said last: whoever registers it has to know.
    """
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    said = bytearray()
    server = _Server(document, digest, files, secrets, LIST_WAIT_S_MAX, said=said)
    try:
        return server.tool()
    except Refused as refused:
        lines = said.decode(errors="replace").strip().splitlines()
        if not lines or refused.failure.code == "declaration_misfit":
            raise
        # It was given its secrets, and may name what it cannot use.
        last = hidden_text(lines[-1].strip(), secrets)
        told = f"{refused.failure.message}; the last that it said: {last}"
        raise Refused(replace(refused.failure, message=told)) from refused
    finally:
        server.close()


class _Server:
    """One server, and the connection to it while it holds."""

    def __init__(
        self,
        document: ToolDocument,
        spec_hash: str,
        files: Mapping[str, bytes],
        secrets: Mapping[str, str],
        wait_s: float | None = None,
        waits: int | None = None,
        said: bytearray | None = None,
    ) -> None:
        """Prepare.

        Args:
            wait_s: for each answer, where no deadline of a call ends the process.
            waits: a pipe that ends when nobody waits for the call any more.
            said: gets the end of what a server that is started here writes to standard error.
        """
        self._said = said
        self._document = document
        self._wait_s = wait_s
        self._waits = waits
        self._heard = Heard()
        self._spec_hash = spec_hash
        self._files = files
        self._secrets = secrets
        self._name = document.tool or document.name
        self._held = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._client: mcp.Client | None = None
        self._tool: mcp.types.Tool | None = None

    def tool(self) -> mcp.types.Tool:
        """The tool as the server tells of it; connects first if need be."""
        if self._tool is None:
            self._connect()
        assert self._tool is not None
        return self._tool

    def call(self, arguments: dict[str, Any], key: str) -> Any:
        """What the tool returned: `structured` where it gives that, and its `content`.

        Raises:
            Refused: the server is not there, the declaration does not fit, or the tool failed.
        """
        check_declared(self._document, self.tool(), self._place())
        assert self._client is not None
        assert self._portal is not None
        self._heard.forget()
        try:
            result = self._portal.call(self._asked, self._client, arguments, key)
        except Refused:  # of a task that the server made
            raise
        except mcp.MCPError as error:
            self._tell_heard()
            if error.code == mcp.types.CONNECTION_CLOSED:
                self.close()
                self._broken(f"the server ended the connection: {error}")
            fail("tool_raised", f"the server refused the call: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a transport raises
            self.close()
            self._tell_heard()
            self._broken(repr(error))
        told = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content = told.get("content", [])
        if result.is_error:
            texts = [one["text"] for one in content if one.get("type") == "text"]
            fail("tool_raised", "\n".join(texts) or "the tool says that it failed")
        return {"content": content} | (
            {"structured": told["structuredContent"]} if "structuredContent" in told else {}
        )

    async def _asked(self, client: mcp.Client, arguments: dict[str, Any], key: str) -> Any:
        # The key where servers look for what is said beside the arguments.
        meta: Any = {"dsec/idempotencyKey": key}
        with anyio.CancelScope() as scope, when_over(self._waits, scope.cancel):
            result = await client.call_tool(self._name, arguments, meta=meta)
        if scope.cancelled_caught:
            fail("deadline", "nobody waits for the call any more")
        return result

    def _tell_heard(self) -> None:
        """Fail with what the transport has seen, where that says more than the client does."""
        if self._heard.too_large:
            self.close()
            most = self._document.output_bytes_max
            fail(
                "output_too_large",
                f"{self._place()}: more came than output_bytes_max {most} allows",
            )
        if self._heard.refusal is not None:
            refusal = self._heard.refusal
            raise Refused(replace(refusal, message=f"{self._place()}: {refusal.message}"))

    def _broken(self, why: str) -> NoReturn:
        fail("mcp_broken", f"{self._place()}: {why}", retryable=self._document.idempotent)

    def _place(self) -> str:
        return self._document.url or self._document.command

    def _connect(self) -> None:
        try:
            self._portal = self._held.enter_context(start_blocking_portal("asyncio"))
            transport = self._transport()
            tasks = Tasks(self._heard, over_http=not self._document.command)
            made = mcp.Client(
                transport, cache=None, read_timeout_seconds=self._wait_s, extensions=[tasks]
            )
            self._client = self._held.enter_context(self._portal.wrap_async_context_manager(made))
            self._tool = self._portal.call(self._found, self._client)
        except Refused:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport raises
            self.close()
            self._tell_heard()
            told: BaseException = error
            while isinstance(told, BaseExceptionGroup):
                told = told.exceptions[0]
            # What it said is not what such a server says: there it is.
            code = "mcp_broken" if isinstance(told, ValueError) else "mcp_unreachable"
            fail(code, f"{self._place()}: {told!r}", retryable=True)

    async def _found(self, client: mcp.Client) -> mcp.types.Tool:
        cursor: str | None = None
        tools: list[mcp.types.Tool] = []
        for _ in range(TOOL_PAGES_MAX):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        found = next((tool for tool in tools if tool.name == self._name), None)
        if found is None:
            some = ", ".join(tool.name for tool in tools[:20]) or "none"
            why = f"{self._place()} has no tool {self._name}; it has {some}"
            fail("declaration_misfit", why)
        check_answers(found, self._place())
        return found

    def _transport(self) -> Any:
        document = self._document
        most = document.output_bytes_max * _GROWTH
        if document.command:
            env = {k: filled(value, self._secrets) for k, value in document.env.items()}
            run, folder = (document.command, document.args, env), self._folder()
            return pipes_of(*run, folder, most, self._heard.over, self._said)
        headers = sendable(document.headers, self._secrets)
        return http_of(document.url, headers, most, self._wait_s, self._heard)

    def _folder(self) -> Path:
        """A directory of this user's own with the spec's files; the same for all its processes."""
        place = Path(tempfile.gettempdir()) / f"dsec-mcp-{os.getuid()}-{self._spec_hash[:32]}"
        if not place.exists():
            made = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
            for name, source in self._files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_bytes(source)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(place)
        if place.stat().st_uid != os.getuid():
            fail("tool_load_failed", f"{place} is another user's")
        return place

    def close(self) -> None:
        """End the connection, and the server that was started for it."""
        self._client = self._portal = self._tool = None
        held, self._held = self._held, contextlib.ExitStack()
        try:
            held.close()
        except Exception as error:  # noqa: BLE001 - it is broken already
            log.info("a connection to an MCP server ended: %r", error)
