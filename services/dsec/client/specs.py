"""From the files users write to sealed specs: documents completed, code collected, hashes made.

Whatever is wrong is a `SpecFileError` that names the file, the key and what to do, here at the
desk of the one who wrote it, and not later in a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from jsonschema import Draft202012Validator, SchemaError
from pydantic import ValidationError

from dsec.client.code_files import collect
from dsec.client.described_tools import described
from dsec.client.local_imports import local_imports
from dsec.client.told import code_sentence
from dsec.client.yaml_file import SpecFileError, read_documents
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError
from dsec.session.documents import (
    DOCUMENTS,
    AgentDocument,
    Document,
    EnvDocument,
    RewardDocument,
    SessionDocument,
    SpecError,
    ToolDocument,
    ToolUse,
    seal,
)
from dsec_contracts.canonical import CanonicalError

D = TypeVar("D", bound=Document)
_HASH = re.compile(r"[0-9a-f]{64}")
_SESSION_KEYS = {"agent", "agents", "env", "reward", "max_steps", "seed"}
_ENV_KEYS = set(EnvDocument.model_fields) - set(AgentDocument.model_fields)
_AGENT_KEYS = set(AgentDocument.model_fields) - set(EnvDocument.model_fields)


@dataclass(frozen=True, slots=True)
class SealedSpec:
    """A spec as it is registered. `name` is for people."""

    kind: str
    spec_hash: str
    content: bytes
    name: str
    document: Any
    files: Mapping[str, bytes]
    tools: tuple[SealedSpec, ...] = ()
    """What an agent may call; registered before it."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A session document with its specs: sealed, or only a hash where one was given."""

    session: SessionDocument
    agent: SealedSpec | str
    env: SealedSpec | str
    reward: SealedSpec | str

    def hashes(self) -> tuple[str, str, str]:
        """The hashes of agent, environment and reward."""
        a, e, r = (s if isinstance(s, str) else s.spec_hash for s in self.specs())
        return a, e, r

    def specs(self) -> tuple[SealedSpec | str, SealedSpec | str, SealedSpec | str]:
        """Agent, environment and reward."""
        return self.agent, self.env, self.reward


def read_spec(kind: str, source: str | Path | Mapping[str, Any]) -> SealedSpec:
    """A sealed spec of one kind.

    Args:
        kind: `agent`, `env`, `reward` or `tool`.
        source: a YAML file; for a reward `env` or `reward.py:function`; or the document itself,
            whose code lies in the working directory.

    Raises:
        SpecFileError: says which file and key, and what to do.
    """
    if kind not in DOCUMENTS:
        raise SpecFileError(f"a spec of kind {kind!r} is not known: agent, env, reward or tool")
    if isinstance(source, Mapping):
        return _seal(kind, dict(source), Path(), f"{kind} document")
    if kind == "reward" and not str(source).endswith((".yaml", ".yml")):
        return read_reward(str(source), Path())
    path = Path(source)
    return _seal(kind, _of_kind(kind, read_documents(path), path), path.parent, str(path))


def read_session(source: str | Path | Mapping[str, Any]) -> SessionPlan:
    """A session document and the specs that it names, by paths relative to its file.

    A file of several documents may hold the specs too: what the session leaves out (`agent`,
    `env`), or names by that same file, is taken from there.

    Raises:
        SpecFileError: says which file and key, and what to do.
    """
    if isinstance(source, Mapping):
        mapping, others, folder, where = dict(source), [], Path(), "session document"
    else:
        path = Path(source)
        documents = read_documents(path)
        mapping = _of_kind("session", documents, path)
        _refuse_spec(mapping, path)
        others = [d for d in documents if d is not mapping]
        folder, where = path.parent, str(path)
    inline: dict[str, SealedSpec] = {}
    for other in others:
        kind = _kind_of(other, where)
        if kind in inline or kind == "session":
            raise SpecFileError(f"{where}: there are two {kind} documents: keep one in this file")
        inline[kind] = _seal(kind, other, folder, where)
        mapping.setdefault(kind, Path(where).name)
    session = _validated(SessionDocument, mapping, where)
    agent, env = (
        _referred(kind, getattr(session, kind), folder, where, inline) for kind in ("agent", "env")
    )
    if _HASH.fullmatch(session.reward):
        return SessionPlan(session, agent, env, session.reward)
    return SessionPlan(session, agent, env, read_reward(session.reward, folder, where))


def _refuse_spec(mapping: Mapping[str, Any], path: Path) -> None:
    """Say so where a spec was given in place of the session that names it."""
    if "entry" not in mapping or set(mapping) & _SESSION_KEYS:
        return
    kind = "agent or environment"
    with contextlib.suppress(SpecFileError):
        kind = _kind_of(dict(mapping), str(path))
    article = "an" if kind[0] in "ae" else "a"
    raise SpecFileError(
        f"{path}: this looks like {article} {kind} spec; `dsec run` takes a session file, which "
        f"names it (`{kind.partition(' ')[0]}: {path.name}`): `dsec init DIR` writes one"
    )


def _referred(
    kind: str, named: str, folder: Path, where: str, inline: Mapping[str, SealedSpec]
) -> SealedSpec | str:
    if _HASH.fullmatch(named):
        return named
    path = folder / named
    if kind in inline and path.name == Path(where).name:
        return inline[kind]
    if not path.exists():
        raise SpecFileError(
            f"{where}: {kind}: {path} does not exist: name a file relative to {where}, or the "
            "hash of a registered spec"
        )
    return read_spec(kind, path)


def _of_kind(kind: str, documents: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The document of one kind in a file; a file with one document is taken to be it."""
    if len(documents) == 1:
        return documents[0]
    found = [d for d in documents if _kind_of(d, str(path)) == kind]
    if len(found) != 1:
        raise SpecFileError(
            f"{path} has {len(found)} {kind} documents: it must have exactly one of that kind"
        )
    return found[0]


def _kind_of(document: dict[str, Any], where: str) -> str:
    """What a document of several is, by the keys that only one kind has."""
    keys = set(document)
    if keys & _SESSION_KEYS:
        return "session"
    if keys & _AGENT_KEYS:
        return "agent"
    if keys & _ENV_KEYS or str(document.get("entry", "")).startswith("gymnasium:"):
        return "env"
    raise SpecFileError(
        f"{where}: cannot tell whether the document with entry {document.get('entry')!r} is an "
        "agent or an environment: add `params: {}` or `kwargs: {}`, or use a file for each"
    )


def _validated(model: type[D], mapping: Mapping[str, Any], where: str) -> D:
    try:
        return model.model_validate(dict(mapping))
    except ValidationError as error:
        told = []
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"])
            told.append(f"{key}: {_advice(item['type'], item['msg'], key, model)}")
        raise SpecFileError(f"{where}: {'; '.join(told)}") from error


def _advice(kind: str, message: str, key: str, model: type[Document]) -> str:
    if kind == "missing":
        return "is missing: add it"
    if kind == "string_unicode":
        return "holds half of a character (a lone surrogate): write the whole one"
    if kind == "extra_forbidden":
        known = "" if "." in key else f"; known keys are {', '.join(model.model_fields)}"
        return f"is no known key{known}"
    text = message.removeprefix("Value error, ").removeprefix(f"{key}: ")
    return text.removeprefix(f"{key} ")


def _seal(kind: str, mapping: Mapping[str, Any], folder: Path, where: str) -> SealedSpec:
    document = _validated(DOCUMENTS[kind], mapping, where)
    if isinstance(document, ToolDocument):
        document = described(document, folder, where)
        _check_parameters(document, where)
    if not isinstance(document, AgentDocument) or not document.tools:
        return _sealed(kind, document, folder, where)
    found = [_tool(use, folder, f"{where}: tools.{n}") for n, use in enumerate(document.tools)]
    # Validated again: only now has every tool its name.
    whole = {**dict(document), "tools": [use.model_dump() for use, _ in found]}
    sealed = _sealed(kind, _validated(AgentDocument, whole, where), folder, where)
    return replace(sealed, tools=tuple(spec for _, spec in found if spec is not None))


def _tool(use: ToolUse, folder: Path, where: str) -> tuple[ToolUse, SealedSpec | None]:
    """A tool with all that is copied from its spec, and the spec where it is not registered yet."""
    if use.is_sealed:
        return use, None
    paths = [folder / use.ref, folder / f"{use.ref}.yaml"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise SpecFileError(f"{where}.ref: {paths[0]} does not exist: name the tool's YAML file")
    spec = read_spec("tool", path)
    document: ToolDocument = spec.document
    copied = {
        "ref": spec.spec_hash,
        "name": use.name or document.name,
        "deadline_s": use.deadline_s or document.deadline_s,
        "description": document.description,
        "parameters": document.parameters,
    }
    return use.model_copy(update=copied), spec


def _check_parameters(document: ToolDocument, where: str) -> None:
    try:
        Draft202012Validator.check_schema(document.parameters)
    except SchemaError as error:
        raise SpecFileError(
            f"{where}: parameters: no JSON Schema (2020-12): {error.message}"
        ) from error


def _sealed(kind: str, document: Any, folder: Path, where: str) -> SealedSpec:
    """Collect the code (only where the entry is a file: nothing else can use it) and seal."""
    place, colon, attribute = document.entry.partition(":")
    whole = document.entry == "env" or getattr(document, "kind", "python") != "python"
    if not whole and not (place and colon and attribute):
        raise SpecFileError(
            f"{where}: entry: {document.entry!r} must be FILE.py:NAME or MODULE:NAME"
            + (" or gymnasium:ID" if kind == "env" else "")
        )
    files: dict[str, bytes] = {}
    if place.endswith(".py") or "/" in place:
        files = collect(folder, document.code, f"{where}: code")
        if place not in files:
            why = f"is not among the files of code: add {place!r}"
            if not (folder / place).is_file():
                why = f"does not exist in {folder}: correct the path"
            raise SpecFileError(f"{where}: entry: {place} {why}")
    elif isinstance(document, ToolDocument) and document.kind == "mcp" and document.ships_code:
        files = collect(folder, document.code, f"{where}: code")
    try:
        spec_hash, content = seal(kind, document, files)
    except (SpecError, CanonicalError) as error:
        raise SpecFileError(f"{where}: {error}") from error
    name = document.name if kind == "tool" else document.entry[:256]
    return SealedSpec(kind, spec_hash, content, name, document, files)


def read_reward(entry: str, folder: Path, where: str = "reward") -> SealedSpec:
    """The sealed spec of `env`, `reward.py:function` or `module:function`.

    What travels is that file and what it imports from its own directory; weights and `per` come
    from the decorated function, so the code is loaded once here.
    """
    if entry == "env":
        return _sealed("reward", RewardDocument(entry="env"), folder, where)
    file, colon, name = entry.partition(":")
    if not colon:
        raise SpecFileError(
            f"{where}: reward: {entry!r} must be `env`, FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    files: dict[str, bytes] = {}
    mapping: dict[str, Any] = {}
    if file.endswith(".py"):
        path = folder / file
        if not path.is_file():
            raise SpecFileError(f"{where}: reward: {path} does not exist: correct the path")
        folder, entry = path.parent, f"{path.name}:{name}"
        mapping["code"] = local_imports(folder, path.name)
        files = collect(folder, mapping["code"], f"{where}: reward")
    mapping |= {"entry": entry} | _decoration(entry, files, where)
    return _seal("reward", mapping, folder, f"{where}: reward {entry}")


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


def load_code(spec_hash: str, files: Mapping[str, bytes], where: str) -> CodeNamespace:
    """The namespace of shipped files.

    Raises:
        SpecFileError: the files cannot be modules side by side.
    """
    try:
        return CodeNamespace(spec_hash, files)
    except CodeError as error:
        raise SpecFileError(f"{where}: {code_sentence(error)}") from error
