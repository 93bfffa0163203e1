"""Which document of a YAML file is which: by the keys that only one kind has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec.client.yaml_file import SpecFileError
from dsec.session.documents import AgentDocument, EnvDocument

SESSION_KEYS = {"agent", "agents", "env", "reward", "max_steps", "seed"}
_ENV_KEYS = set(EnvDocument.model_fields) - set(AgentDocument.model_fields)
_AGENT_KEYS = set(AgentDocument.model_fields) - set(EnvDocument.model_fields)


def of_kind(kind: str, documents: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The document of one kind in a file; a file with one document is taken to be it."""
    if len(documents) == 1:
        return documents[0]
    found = [d for d in documents if kind_of(d, str(path)) == kind]
    if len(found) != 1:
        raise SpecFileError(
            f"{path} has {len(found)} {kind} documents: it must have exactly one of that kind"
        )
    return found[0]


def kind_of(document: dict[str, Any], where: str) -> str:
    """What a document of several is, by the keys that only one kind has."""
    keys = set(document)
    if keys & SESSION_KEYS:
        return "session"
    if keys & _AGENT_KEYS:
        return "agent"
    if keys & _ENV_KEYS or str(document.get("entry", "")).startswith("gymnasium:"):
        return "env"
    raise SpecFileError(
        f"{where}: cannot tell whether the document with entry {document.get('entry')!r} is an "
        "agent or an environment: add `params: {}` or `kwargs: {}`, or use a file for each"
    )
