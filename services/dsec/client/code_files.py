"""Which source files travel with a spec: those its `code` patterns name, below its own directory.

What is collected is part of the spec's hash, so the rule must be dull: files only, in sorted
order, nothing hidden, nothing that no import could reach, and no link that leaves the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dsec.client.told import code_sentence
from dsec.client.yaml_file import SpecFileError
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError
from dsec.session.documents import SPEC_FILE_BYTES_MAX, SPEC_FILES_MAX

FILES_LOOKED_AT_MAX = 100_000


def collect(directory: Path, patterns: list[str], where: str) -> dict[str, bytes]:
    """The files that `patterns` name, by their path relative to `directory`.

    Args:
        where: how errors name the file and key that the patterns are from.

    Raises:
        SpecFileError: a pattern leaves the directory, a link does, or a bound is passed.
    """
    root = directory.resolve()
    found: dict[str, bytes] = {}
    looked_at = 0
    for pattern in patterns:
        _check_pattern(pattern, where)
        for path in _matching(directory, pattern, where):
            looked_at += 1
            if looked_at > FILES_LOOKED_AT_MAX:
                raise SpecFileError(f"{where}: {pattern!r} matches too many files: narrow it")
            relative = path.relative_to(directory)
            if not path.is_file() or not _importable(relative):
                continue
            if not path.resolve().is_relative_to(root):
                raise SpecFileError(
                    f"{where}: {relative.as_posix()} is a link out of {directory}: copy the file "
                    "there, or narrow the pattern"
                )
            found[relative.as_posix()] = _read(path, where)
            if len(found) > SPEC_FILES_MAX:
                raise SpecFileError(
                    f"{where}: more than {SPEC_FILES_MAX} files match; name those that are needed"
                )
    return found


def _matching(directory: Path, pattern: str, where: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except (OSError, ValueError) as error:  # `**.py`, or a name that no file system takes
        raise SpecFileError(f"{where}: {pattern[:64]!r} is no pattern: {_why(error)}") from error


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check_pattern(pattern: str, where: str) -> None:
    parts = PurePosixPath(pattern)
    if not pattern or parts.is_absolute() or ".." in parts.parts or "\\" in pattern:
        raise SpecFileError(
            f"{where}: {pattern!r} must be a relative pattern below the spec's directory"
        )
    if not pattern.endswith(".py"):
        raise SpecFileError(f"{where}: {pattern!r} must end in .py: only Python files are shipped")


def _importable(relative: Path) -> bool:
    """Whether an import could reach the file: `agent copy.py` and `.#agent.py` are leftovers."""
    if relative.as_posix() == "__init__.py":
        return False
    parts = [*relative.parts[:-1], relative.stem]
    return all(("_" + part.replace("-", "_")).isidentifier() for part in parts)


def _read(path: Path, where: str) -> bytes:
    try:
        size = path.stat().st_size
        if size > SPEC_FILE_BYTES_MAX:
            raise SpecFileError(
                f"{where}: {path.name} has {size} bytes; a file takes {SPEC_FILE_BYTES_MAX}"
            )
        return path.read_bytes()
    except OSError as error:
        raise SpecFileError(f"{where}: {path} cannot be read: {error.strerror}") from error


def load_code(spec_hash: str, files: Mapping[str, bytes], where: str) -> CodeNamespace:
    """The namespace of shipped files.

    Raises:
        SpecFileError: the files cannot be modules side by side.
    """
    try:
        return CodeNamespace(spec_hash, files)
    except CodeError as error:
        raise SpecFileError(f"{where}: {code_sentence(error)}") from error
