"""A reward function as users name it (`env`, FILE.py:NAME or MODULE:NAME), as a sealed spec."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.client.code_files import collect, load_code
from dsec.client.local_imports import local_imports
from dsec.client.sealing import SealedSpec, seal_code, seal_document
from dsec.client.told import code_sentence
from dsec.client.yaml_file import SpecFileError, is_file
from dsec.platform.copies import ending_copies
from dsec.session.code_errors import CodeError
from dsec.session.documents import RewardDocument


def read_reward(entry: str, folder: Path, where: str = "reward") -> SealedSpec:
    """The sealed spec of `env`, `reward.py:function` or `module:function`.

    What travels is that file and what it imports from its own directory; weights and `per` come
    from the decorated function, so the code is loaded once here.
    """
    if entry == "env":
        return seal_code("reward", RewardDocument(entry="env"), folder, where)
    file, colon, name = entry.partition(":")
    if not colon:
        raise SpecFileError(
            f"{where}: reward: {entry!r} must be `env`, FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    files: dict[str, bytes] = {}
    mapping: dict[str, Any] = {}
    if file.endswith(".py"):
        path = folder / file
        if not is_file(path):
            raise SpecFileError(f"{where}: reward: {path} does not exist: correct the path")
        folder, entry = path.parent, f"{path.name}:{name}"
        mapping["code"] = local_imports(folder, path.name)
        files = collect(folder, mapping["code"], f"{where}: reward")
    mapping |= {"entry": entry} | _decoration(entry, files, where)
    return seal_document("reward", mapping, folder, f"{where}: reward {entry}")


@ending_copies()
def _decoration(entry: str, files: Mapping[str, bytes], where: str) -> dict[str, Any]:
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    namespace = load_code(digest, files, f"{where}: reward")
    try:
        function = namespace.load(entry)
    except CodeError as error:
        raise SpecFileError(f"{where}: reward: {code_sentence(error)}") from error
    finally:
        namespace.unload()
    if not callable(function) or not hasattr(function, "weights") or not hasattr(function, "per"):
        raise SpecFileError(
            f"{where}: reward: {entry} is no reward function: decorate it with "
            "`@dsec.reward(weights={...})`"
        )
    return {
        "weights": dict(function.weights or {}),
        "per": function.per,
        "services": list(getattr(function, "services", ())),
        "nonfinite": getattr(function, "nonfinite", False) is True,
    }
