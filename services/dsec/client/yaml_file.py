"""YAML files as users write them, read so that a slip of the pen is an error and not a default.

Plain `safe_load` keeps the last of two equal keys and reads `1e-3` as text; both would silently
change what a session is, so both are settled here. Errors name the file and the line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FILE_BYTES_MAX = 1 << 20


class SpecFileError(ValueError):
    """A file that users wrote and that cannot be used: which file, which key, what to do."""


class _Loader(yaml.SafeLoader):
    """`SafeLoader`, but floats as in YAML 1.2 and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file, each a mapping.

    Raises:
        SpecFileError: the file cannot be read, is no YAML, or holds something else.
    """
    if path.suffix == ".py":
        raise SpecFileError(
            f"{path} is Python: give the YAML file that names it; `dsec init DIR` writes a "
            "working set"
        )
    if path.is_dir():
        raise SpecFileError(
            f"{path} is a folder: name a file in it, such as {path / 'session.yaml'}"
        )
    try:
        if path.is_file() and path.stat().st_size > FILE_BYTES_MAX:
            raise SpecFileError(f"{path} has more than {FILE_BYTES_MAX} bytes: it is no spec")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecFileError(
            f"{path} does not exist: correct the path, or let `dsec init DIR` write a working set"
        ) from None
    except OSError as error:
        raise SpecFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecFileError(f"{path} is not UTF-8 text: {error.reason}") from error
    try:
        found = [d for d in yaml.load_all(text, Loader=_Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecFileError(f"{path}, line {line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecFileError(f"{path} is no YAML: {error}") from error
    for document in found:
        if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
            raise SpecFileError(f"{path}: a document must be a mapping of keys to values")
    if not found:
        raise SpecFileError(f"{path} is empty: `dsec init DIR` writes a working set to start from")
    return found
