"""The documents users write (agent, environment, reward, session), validated and completed.

A reserved key that is not implemented yet is refused by name, never ignored; an unknown key is
refused too, so that a typing error does not become a default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dsec_contracts.canonical import decode, encode

SPEC_FILE_BYTES_MAX = 1 << 20
SPEC_FILES_MAX = 256


class Document(BaseModel):
    """A document: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _not_yet(name: str, hint: str) -> ValueError:
    return ValueError(f"{name} is reserved and not implemented yet: {hint}")


class PolicyUse(Document):
    """Which policy drives the agent, and when new weights arrive."""

    name: str
    update: str = "pinned"

    @field_validator("update")
    @classmethod
    def _update(cls, value: str) -> str:
        if value in ("episode", "step"):
            raise _not_yet(f"policy.update: {value}", "use `pinned`")
        if value != "pinned":
            raise ValueError("policy.update must be `pinned`")
        return value


class Anchors(Document):
    """When state is captured."""

    every_steps: int = 0

    @field_validator("every_steps")
    @classmethod
    def _every_steps(cls, value: int) -> int:
        if value != 0:
            raise _not_yet("anchors.every_steps", "leave it at 0; sessions restart from step 0")
        return value


class AgentDocument(Document):
    """agent_spec.yaml"""

    entry: str
    code: list[str] = Field(default_factory=lambda: ["*.py"])
    params: dict[str, Any] = Field(default_factory=dict)
    policy: PolicyUse | None = None
    tools: list[Any] = Field(default_factory=list)
    resource_profile: dict[str, float] = Field(default_factory=dict)
    execution_plan: Any = None
    anchors: Anchors = Anchors()
    deterministic_mode: bool = True
    tool_turns_max: Annotated[int, Field(ge=1)] = 8
    step_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: list[Any]) -> list[Any]:
        if value:
            raise _not_yet("tools", "leave the list empty")
        return value

    @field_validator("execution_plan")
    @classmethod
    def _execution_plan(cls, value: Any) -> Any:
        if value is not None:
            raise _not_yet("execution_plan", "leave it null")
        return value


class Observations(Document):
    """What is recorded of observations."""

    inline_bytes_max: Annotated[int, Field(ge=0, le=65_536)] = 4096
    above: Literal["reference", "none"] = "reference"


class EnvDocument(Document):
    """env_spec.yaml"""

    entry: str
    code: list[str] = Field(default_factory=lambda: ["*.py"])
    kwargs: dict[str, Any] = Field(default_factory=dict)
    episodes_max: Annotated[int, Field(ge=1)] | None = None
    observations: Observations = Observations()

    @field_validator("entry")
    @classmethod
    def _entry(cls, value: str) -> str:
        scheme = value.partition(":")[0]
        if scheme in ("pettingzoo", "ws", "wss", "http", "https"):
            raise _not_yet(f"entry {scheme}:", "use gymnasium:ID, module:Class or file.py:Class")
        return value


class RewardDocument(Document):
    """A reward function: `env`, or code with weights for its components."""

    entry: str = "env"
    code: list[str] = Field(default_factory=lambda: ["*.py"])
    weights: dict[str, float] = Field(default_factory=dict)
    per: str = "step"

    @field_validator("per")
    @classmethod
    def _per(cls, value: str) -> str:
        if value == "episode":
            raise _not_yet("per: episode", "use per: step")
        if value != "step":
            raise ValueError("per must be `step`")
        return value


class SessionDocument(Document):
    """session.yaml: paths or spec hashes, and the seed."""

    agent: str
    env: str
    reward: str = "env"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)] = 0
    max_steps: Annotated[int, Field(ge=1, le=10**9, strict=True)]
    group_id: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    agents: Any = None

    @field_validator("agents")
    @classmethod
    def _agents(cls, value: Any) -> Any:
        if value is not None:
            raise _not_yet("agents", "one agent a session: use `agent`")
        return value


DOCUMENTS: dict[str, type[Document]] = {
    "agent": AgentDocument,
    "env": EnvDocument,
    "reward": RewardDocument,
}


class SpecError(ValueError):
    """Spec bytes that are no spec. Names what is wrong."""


def seal(kind: str, document: Document, files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """A spec's hash and canonical content."""
    if len(files) > SPEC_FILES_MAX:
        raise SpecError(f"{len(files)} files; a spec takes {SPEC_FILES_MAX}")
    for name, source in files.items():
        if len(source) > SPEC_FILE_BYTES_MAX:
            raise SpecError(f"{name} has {len(source)} bytes; a file takes {SPEC_FILE_BYTES_MAX}")
    value = {"kind": kind, "document": document.model_dump(mode="python"), "files": dict(files)}
    content = encode(value)
    return hashlib.sha256(content).hexdigest(), content


def unseal(content: bytes, kind: str) -> tuple[Any, dict[str, bytes]]:
    """The document and the files of a spec.

    Raises:
        SpecError: not a spec of this kind, or its document does not fit.
    """
    try:
        value = decode(content)
        found, document, files = value["kind"], value["document"], value["files"]
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(f"the content is no spec: {error!r}") from error
    if found != kind:
        raise SpecError(f"this is a spec of kind {found!r}, not {kind!r}")
    if not isinstance(files, dict) or not all(isinstance(b, bytes) for b in files.values()):
        raise SpecError("files must map paths to bytes")
    try:
        return DOCUMENTS[kind].model_validate(document), files
    except ValueError as error:
        raise SpecError(str(error)) from error
