"""From the files users write to sealed specs: documents completed, code collected, hashes made.

Whatever is wrong is a `SpecFileError` that names the file, the key and what to do, here at the
desk of the one who wrote it, and not later in a worker.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec.client.document_kinds import SESSION_KEYS, kind_of, of_kind
from dsec.client.reward_file import read_reward
from dsec.client.sealing import SealedSpec, read_file, seal_document, validated
from dsec.client.yaml_file import SpecFileError, read_documents
from dsec.session.documents import DOCUMENTS, SessionDocument

_HASH = re.compile(r"[0-9a-f]{64}")


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
        return seal_document(kind, dict(source), Path(), f"{kind} document")
    if kind == "reward" and not str(source).endswith((".yaml", ".yml")):
        return read_reward(str(source), Path())
    path = Path(source)
    return read_file(kind, path)


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
        mapping = of_kind("session", documents, path)
        _refuse_spec(mapping, path)
        others = [d for d in documents if d is not mapping]
        folder, where = path.parent, str(path)
    inline: dict[str, SealedSpec] = {}
    for other in others:
        kind = kind_of(other, where)
        if kind in inline or kind == "session":
            raise SpecFileError(f"{where}: there are two {kind} documents: keep one in this file")
        inline[kind] = seal_document(kind, other, folder, where)
        mapping.setdefault(kind, Path(where).name)
    session = validated(SessionDocument, mapping, where)
    agent, env = (
        _referred(kind, getattr(session, kind), folder, where, inline) for kind in ("agent", "env")
    )
    if _HASH.fullmatch(session.reward):
        return SessionPlan(session, agent, env, session.reward)
    return SessionPlan(session, agent, env, read_reward(session.reward, folder, where))


def _refuse_spec(mapping: Mapping[str, Any], path: Path) -> None:
    """Say so where a spec was given in place of the session that names it."""
    if "entry" not in mapping or set(mapping) & SESSION_KEYS:
        return
    kind = "agent or environment"
    with contextlib.suppress(SpecFileError):  # it may be either, then
        kind = kind_of(dict(mapping), str(path))
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
    if not os.path.exists(path):  # not the method, which raises at impossible names
        raise SpecFileError(
            f"{where}: {kind}: {path} does not exist: name a file relative to {where}, or the "
            "hash of a registered spec"
        )
    return read_spec(kind, path)
