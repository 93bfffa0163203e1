"""What user code raised, in one sentence: the file and line of theirs, and the error itself."""

from __future__ import annotations

import re

from dsec.session.code_errors import CodeError

_FRAME = re.compile(r'File "dsec_code_[0-9a-f]+/([^"]+)", line (\d+)')


def last_line(traceback_text: str) -> str:
    """The error of a formatted traceback, with the innermost place in shipped code."""
    lines = [line.strip() for line in traceback_text.splitlines() if line.strip()]
    if not lines:
        return "it failed without a message"
    frames = _FRAME.findall(traceback_text)
    return f"{frames[-1][0]}, line {frames[-1][1]}: {lines[-1]}" if frames else lines[-1]


def code_sentence(error: CodeError) -> str:
    """Why code could not be loaded."""
    if error.code != "import_failed":
        return error.message
    told = last_line(error.message)
    if "ModuleNotFoundError" in told:
        told += ": install it here and where the services run, or name its file under `code`"
    return told
