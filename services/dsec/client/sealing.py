"""From a document to a sealed spec: validated, completed, its code collected, its hash made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from jsonschema import Draft202012Validator, SchemaError
from pydantic import ValidationError

from dsec.client.code_files import collect
from dsec.client.described_tools import described
from dsec.client.document_kinds import of_kind
from dsec.client.yaml_file import SpecFileError, is_file, read_documents
from dsec.session.documents import (
    DOCUMENTS,
    AgentDocument,
    Document,
    SpecError,
    ToolDocument,
    ToolUse,
    seal,
)
from dsec_contracts.canonical import CanonicalError

D = TypeVar("D", bound=Document)


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


def validated(model: type[D], mapping: Mapping[str, Any], where: str) -> D:
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


def read_file(kind: str, path: Path) -> SealedSpec:
    """The sealed spec of one kind that a YAML file has.

    Raises:
        SpecFileError: says which file and key, and what to do.
    """
    document = of_kind(kind, read_documents(path), path)
    return seal_document(kind, document, path.parent, str(path))


def seal_document(kind: str, mapping: Mapping[str, Any], folder: Path, where: str) -> SealedSpec:
    document = validated(DOCUMENTS[kind], mapping, where)
    if isinstance(document, ToolDocument):
        document = described(document, folder, where)
        _check_parameters(document, where)
    if not isinstance(document, AgentDocument) or not document.tools:
        return seal_code(kind, document, folder, where)
    found = [_tool(use, folder, f"{where}: tools.{n}") for n, use in enumerate(document.tools)]
    # Validated again: only now has every tool its name.
    whole = {**dict(document), "tools": [use.model_dump() for use, _ in found]}
    sealed = seal_code(kind, validated(AgentDocument, whole, where), folder, where)
    return replace(sealed, tools=tuple(spec for _, spec in found if spec is not None))


def _tool(use: ToolUse, folder: Path, where: str) -> tuple[ToolUse, SealedSpec | None]:
    """A tool with all that is copied from its spec, and the spec where it is not registered yet."""
    if use.is_sealed:
        return use, None
    paths = [folder / use.ref, folder / f"{use.ref}.yaml"]
    path = next((path for path in paths if is_file(path)), None)
    if path is None:
        raise SpecFileError(f"{where}.ref: {paths[0]} does not exist: name the tool's YAML file")
    spec = read_file("tool", path)
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


def seal_code(kind: str, document: Any, folder: Path, where: str) -> SealedSpec:
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
            if not is_file(folder / place):
                why = f"does not exist in {folder.absolute()}: correct the path"
            raise SpecFileError(f"{where}: entry: {place} {why}")
    elif isinstance(document, ToolDocument) and document.kind == "mcp" and document.ships_code:
        files = collect(folder, document.code, f"{where}: code")
    try:
        spec_hash, content = seal(kind, document, files)
    except (SpecError, CanonicalError) as error:
        raise SpecFileError(f"{where}: {error}") from error
    name = document.name if kind == "tool" else document.entry[:256]
    return SealedSpec(kind, spec_hash, content, name, document, files)
