"""What a tool's own server says of it, copied into its spec when that is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsec.client.code_files import collect
from dsec.client.openapi import with_operation
from dsec.client.yaml_file import SpecFileError
from dsec.platform.secrets import SecretAbsent, secrets_of
from dsec.session.tool_document import ToolDocument
from dsec.tool.frames import Refused


def described(document: ToolDocument, folder: Path, where: str) -> ToolDocument:
    """A tool document with the parameters and the description that it leaves to its server.

    Raises:
        SpecFileError: the server cannot be asked, or has no such tool.
    """
    if document.kind == "openapi" and document.document:
        return with_operation(document, folder, where)
    if document.kind == "mcp" and "parameters" not in document.model_fields_set:
        return _listed(document, folder, where)
    return document


def _listed(document: ToolDocument, folder: Path, where: str) -> ToolDocument:
    files = collect(folder, document.code, f"{where}: code") if document.ships_code else {}
    try:
        from dsec.tool.mcp_server import listed
    except ImportError as missing:
        raise SpecFileError(
            f"{where}: kind: mcp needs the MCP client ({missing}): pip install 'dsec[mcp]'"
        ) from missing
    try:
        tool = listed(document, files, _secrets(document, where))
    except Refused as refused:
        raise SpecFileError(
            f"{where}: parameters are left to the server, and it cannot be asked: "
            f"{refused.failure.message}: "
            f"{'mend' if document.command else 'start'} it, or write `parameters`"
        ) from refused
    told = {
        "parameters": tool.input_schema,
        "description": document.description or tool.description or "",
    }
    return document.model_copy(update=told)


def _secrets(document: ToolDocument, where: str) -> Mapping[str, str]:
    try:
        return secrets_of(os.environ, document.secret_names, "this environment")
    except SecretAbsent as absent:
        raise SpecFileError(
            f"{where}: to ask the server for its parameters: {absent}; or write `parameters`"
        ) from absent
