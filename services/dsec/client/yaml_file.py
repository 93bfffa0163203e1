"""YAML files as users write them, read so that a slip of the pen is an error and not a default.

Plain `safe_load` keeps the last of two equal keys and reads `1e-3` as text; both would silently
change what a session is, so both are settled here. Errors name the file and the line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

FILE_BYTES_MAX = 1 << 20
VALUES_MAX = 1_000_000
"""Of a file, each alias counted as all that it stands for: a file of a few hundred bytes can stand
for more than any memory holds, and whoever walks it would."""


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


def is_file(path: Path) -> bool:
    """Whether there is a file. There is none of a name that no file system takes, at which the
    method of the same name raises."""
    return os.path.isfile(path)


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
    if os.path.isdir(path):  # it raises at no name
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
    except (AttributeError, LookupError) as error:
        # What the library's own constructors raise where a tag is given to what does not fit it.
        raise SpecFileError(
            f"{path} is no YAML: a tag (`!!…`) stands at a value that it is not for"
        ) from error
    for document in found:
        if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
            raise SpecFileError(f"{path}: a document must be a mapping of keys to values")
    _check_size(found, path)
    if not found:
        raise SpecFileError(f"{path} is empty: `dsec init DIR` writes a working set to start from")
    return found


def _check_size(documents: list[dict[str, Any]], path: Path) -> None:
    """Refuse what aliases make endless, or larger than `VALUES_MAX`."""
    sizes: dict[int, int] = {}
    try:
        size = sum(_values(document, sizes) for document in documents)
    except RecursionError:
        raise SpecFileError(
            f"{path} is nested too deeply, or an alias in it holds itself"
        ) from None
    if size > VALUES_MAX:
        raise SpecFileError(
            f"{path} stands for over {VALUES_MAX} values once its aliases (`*name`) are written out"
        )


def _values(value: Any, sizes: dict[int, int]) -> int:
    """How many values there are in one. Each list and mapping is walked once.

    Raises:
        RecursionError: it holds itself, or is too deep.
    """
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        return 1
    if (known := sizes.get(id(value))) is None:
        known = sizes[id(value)] = 1 + sum(_values(part, sizes) for part in parts)
    return known
