"""Tools from a few lines of source."""

from __future__ import annotations

import textwrap
from typing import Any

from dsec.session.documents import ToolDocument, seal
from dsec.tool.processes import Program


def spec_of(body: str = "def tool(): return 1", **options: Any) -> tuple[str, bytes]:
    """Hash and content of a Python tool whose file has this source and defines `tool`."""
    document = ToolDocument(name="tool", entry="tool.py:tool", **options)
    return seal("tool", document, {"tool.py": textwrap.dedent(body).encode()})


def program_of(body: str, values: dict[str, str] | None = None, **options: Any) -> Program:
    """What a calling process is given of such a tool."""
    return Program(*spec_of(body, **options), values or {})
