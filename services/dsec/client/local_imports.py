"""Which files of a folder a Python file needs: itself, and what it imports from there.

A reward lies beside its agent, and shipping the whole folder would give the reward another hash
whenever the agent is edited. Imports are read, not run: wherever they stand in the file they count,
and what is only imported by a computed name is not seen (nor would shipped code find it).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from dsec.client.yaml_file import is_file


def local_imports(folder: Path, entry: str) -> list[str]:
    """The files that `entry`, a path relative to `folder`, needs of that folder. Sorted, itself
    among them."""
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if path in found or not is_file(folder / path):
            continue
        found.add(path)
        for module in _modules(folder, path):
            waiting += _files(folder, module)
    return sorted(found)


def _modules(folder: Path, path: str) -> Iterator[str]:
    """The dotted names that a file imports, as seen from the folder."""
    try:
        tree = ast.parse((folder / path).read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # whoever loads it says what is wrong with it
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            if not base or node.level > len(package):
                continue  # a relative import at the top: an error when it is loaded
            yield base
            for alias in node.names:
                names = _submodules(folder, base) if alias.name == "*" else [alias.name]
                yield from (f"{base}.{name}" for name in names)


def _submodules(folder: Path, package: str) -> list[str]:
    """What `from package import *` may import: its `__all__` may name any of its modules."""
    return [path.stem for path in folder.joinpath(*package.split(".")).glob("*.py")]


def _files(folder: Path, module: str) -> Iterator[str]:
    """The files that are loaded for a dotted name: those of its packages, and its own."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        place = "/".join(parts[:depth])
        if is_file(folder / place / "__init__.py"):
            yield f"{place}/__init__.py"
        elif is_file(folder / f"{place}.py"):
            yield f"{place}.py"
            return  # a module has no modules below it
        elif not os.path.isdir(folder / place):
            return
