"""Whether a tool of an MCP server is what its spec says, and one that can be called from here."""

from __future__ import annotations

import mcp

from dsec.session.tool_document import ToolDocument
from dsec.tool.http_exchange import fail


def check_declared(document: ToolDocument, tool: mcp.types.Tool, place: str) -> None:
    """The spec was written, or copied, before: the server may have changed since.

    Args:
        place: where the server is.

    Raises:
        Refused: the tool is another than the spec says.
    """
    declared, wanted = document.parameters, tool.input_schema
    known = set(wanted.get("properties", {}))
    closed = wanted.get("additionalProperties") is False
    unknown = sorted(set(declared.get("properties", {})) - known) if closed else []
    absent = sorted(
        set(wanted.get("required", [])) - set(declared.get("properties", {}))
        if "properties" in declared
        else ()
    )
    if unknown or absent:
        told = [f"it does not take {name}" for name in unknown]
        told += [f"it needs {name}, which the spec does not have" for name in absent]
        fail(
            "declaration_misfit",
            f"the tool {tool.name} of {place} is not what its spec says: "
            f"{'; '.join(told)}; register it anew",
        )


def check_answers(tool: mcp.types.Tool, place: str) -> None:
    """A tool may answer in a way that the client library does not know.

    Raises:
        Refused: it does.
    """
    if tool.execution is not None and tool.execution.task_support == "required":
        fail(
            "declaration_misfit",
            f"the tool {tool.name} of {place} answers only through the tasks of MCP 2025-11-25, "
            "which are not spoken here; those of MCP 2026-07-28 are",
        )
