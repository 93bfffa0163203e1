"""The documents users write (agent, environment, reward, session), validated and completed.

A reserved key that is not implemented yet is refused by name, never ignored; an unknown key is
refused too, so that a typing error does not become a default.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from dsec.session.document_base import Document as Document
from dsec.session.document_base import not_yet as _not_yet
from dsec.session.tool_document import ToolDocument as ToolDocument
from dsec.session.tool_document import ToolName
from dsec_contracts.canonical import decode, encode
from dsec_contracts.curriculum import Level
from dsec_contracts.keys import TURNS_PER_STEP_MAX
from dsec_contracts.session import LagSteps, ShortText, check_lags

SPEC_FILE_BYTES_MAX = 1 << 20
SPEC_FILES_MAX = 256
TOOLS_MAX = 64
RESOURCE_AMOUNT_MAX = 2.0**60
"""Of one resource, in its own unit: an exbibyte, where it is memory. No node has more."""


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
    """When state is captured, beside what the agent's own `state_anchor` asks for."""

    every_steps: Annotated[int, Field(ge=0, le=10**9, strict=True)] = 0
    """Behind every so many environment steps; 0: never."""
    at_episode_start: bool = False
    """Behind the reset that begins an episode, but for the first, which is where sessions begin."""

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: Any) -> dict[str, Any]:
        # Specs are named by their bytes: one that does not use the key keeps its name.
        told: dict[str, Any] = serialize(self)
        if not self.at_episode_start:
            del told["at_episode_start"]
        return told


class ToolUse(Document):
    """A tool that an agent may call. Users write `ref`, `blocking` and `deadline_s`.

    The rest is copied from the tool's spec when the agent is sealed: it is what a model is told,
    and so neither worker nor verifier has to look for the spec. What is called is the spec.
    """

    ref: str
    """In what users write a file; in a sealed spec the tool spec's hash."""
    blocking: bool = True
    """False: a call returns at once, and its result reaches `on_tool_result` later."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    name: ToolName | None = None
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_sealed(self) -> bool:
        """Whether it names a spec by its hash, and has all that is copied from there."""
        whole = self.name is not None and self.deadline_s is not None
        return whole and re.fullmatch(r"[0-9a-f]{64}", self.ref) is not None


class AgentDocument(Document):
    """agent_spec.yaml"""

    entry: str
    code: list[str] = Field(default_factory=lambda: ["*.py"])
    params: dict[str, Any] = Field(default_factory=dict)
    policy: PolicyUse | None = None
    tools: Annotated[list[ToolUse], Field(max_length=TOOLS_MAX)] = Field(default_factory=list)
    resource_profile: dict[str, Annotated[float, Field(ge=0, le=RESOURCE_AMOUNT_MAX)]] = Field(
        default_factory=dict
    )
    """What a session takes of a node: `cpu` in cores, `memory_bytes`, or a name of one's own."""
    execution_plan: Any = None
    anchors: Anchors = Anchors()
    deterministic_mode: bool = True
    tool_turns_max: Annotated[int, Field(ge=1, le=TURNS_PER_STEP_MAX)] = 8
    tool_calls_max: Annotated[int, Field(ge=1, le=10**9, strict=True)] | None = None
    """Calls of a session in all; those beyond it fail with the code `quota`."""
    step_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0

    @model_validator(mode="after")
    def _tools(self) -> Self:
        names = [tool.name for tool in self.tools if tool.name is not None]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tools: two of them are called {twice}: rename one")
        if self.tools and not self.deterministic_mode:
            raise _not_yet("tools with deterministic_mode: false", "use deterministic_mode: true")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: Any) -> dict[str, Any]:
        # Specs are named by their bytes: one that does not use the key keeps its name.
        told: dict[str, Any] = serialize(self)
        if self.tool_calls_max is None:
            told.pop("tool_calls_max", None)
        return told

    def tool_names(self) -> tuple[str, ...]:
        """What the agent calls its tools."""
        return tuple(tool.name for tool in self.tools if tool.name is not None)

    def late_tool_names(self) -> frozenset[str]:
        """Those that do not block."""
        return frozenset(
            tool.name for tool in self.tools if tool.name is not None and not tool.blocking
        )

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
    deterministic_mode: bool = True
    """False: it gives other results when it is executed again, so it never is: D0."""

    @model_validator(mode="after")
    def _recorded(self) -> Self:
        if not self.deterministic_mode and self.observations.above == "none":
            raise ValueError(
                "observations.above: none leaves out what deterministic_mode: false cannot give "
                "again: use reference"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: Any) -> dict[str, Any]:
        # Specs are named by their bytes: one that does not use the key keeps its name.
        told: dict[str, Any] = serialize(self)
        if self.deterministic_mode:
            told.pop("deterministic_mode", None)
        return told

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
    per: Literal["step", "episode"] = "step"
    services: Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    """The outside services that the function may ask. Registering a function copies them from its
    decorator; the reward service asks no other."""
    nonfinite: bool = False
    """Whether NaN and infinities are meant."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.entry == "env" and self.per == "episode":
            raise ValueError("per: episode needs a function: an environment rewards each step")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: Any) -> dict[str, Any]:
        # Specs are named by their bytes: one that does not use a key keeps its name.
        told: dict[str, Any] = serialize(self)
        for name in ("services", "nonfinite"):
            if not told[name]:
                del told[name]
        return told


class SessionDocument(Document):
    """session.yaml: paths or spec hashes, and the seed."""

    agent: str
    env: str
    reward: str = "env"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)] = 0
    max_steps: Annotated[int, Field(ge=1, le=10**9, strict=True)]
    group_id: ShortText | None = None
    labels: dict[ShortText, ShortText] = Field(default_factory=dict, max_length=64)
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    lag_steps: LagSteps | None = None
    """What step t caused is delivered exactly before step t + lag_steps, so that runs with late
    rewards and tools are alike."""
    reward_lag_steps_max: LagSteps | None = None
    """Rewards may be deferred, by so many steps at most."""
    curriculum_level: Level | None = None
    """Of the first episode: reset() of the environment gets it in its options, and the scheduler
    may change it from one episode to the next. Null: the session has no curriculum."""
    agents: Any = None

    @model_validator(mode="after")
    def _lags(self) -> Self:
        check_lags(self.lag_steps, self.reward_lag_steps_max)
        return self

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
    "tool": ToolDocument,
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
