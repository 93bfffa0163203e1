"""tool.yaml: what an agent may call, and where that is.

A tool is a Python function (`python`), one HTTP request (`http`), an operation of an OpenAPI
document (`openapi`), a tool of an MCP server (`mcp`), or a model behind an OpenAI-compatible
endpoint (`openai`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_serializer, model_validator

from dsec.session.document_base import Document
from dsec_contracts.service import SECRET_USE

OUTPUT_BYTES_MAX = 16 << 20
"""What one tool may return, whatever its spec says."""
ATTEMPTS_MAX = 16
KINDS = ("python", "http", "openapi", "mcp", "openai")

SecretName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
"""What OpenAI's API takes for the name of a function."""
Place = Literal["path", "query", "header", "body"]

_OF_KINDS: dict[str, tuple[str, ...]] = {
    "entry": ("python",),
    "url": ("http", "openapi", "mcp", "openai"),
    "method": ("http", "openapi"),
    "headers": ("http", "openapi", "mcp", "openai"),
    "accepted_is_result": ("http", "openapi"),
    "document": ("openapi",),
    "operation": ("openapi",),
    "places": ("openapi",),
    "command": ("mcp",),
    "args": ("mcp",),
    "env": ("mcp",),
    "tool": ("mcp",),
    "model": ("openai",),
    "api": ("openai",),
    "stream": ("openai",),
    "request": ("openai",),
    "api_key": ("openai",),
}
"""The keys that not every kind of tool has."""
_ADDED = frozenset(_OF_KINDS) - {"entry", "url", "method", "headers"} | {"quota", "attempts_max"}


class Quota(Document):
    """How much of a tool may be used. A call beyond it fails with the code `quota`."""

    calls_per_session: Annotated[int, Field(ge=1, le=10**9, strict=True)] | None = None
    """Calls of one session, from its start to its end. Counted by the session, so it is exact, the
    same after a restart and whoever makes the calls."""
    concurrency: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    """Calls at a time, by all replicas together. More wait, within their deadlines."""
    per_s: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Calls a second, by all replicas together, evenly spaced. More wait, as above."""


class ToolDocument(Document):
    """tool.yaml"""

    kind: str = "python"
    name: ToolName
    description: str = ""
    entry: str = ""
    """`python`: FILE.py:FUNCTION or MODULE:FUNCTION, called with the arguments by name."""
    code: list[str] = Field(default_factory=lambda: ["*.py"])
    """Files that travel with the spec. A `command` runs in a directory that holds them."""
    url: str = ""
    """`http`: where arguments go, in the query of a GET or DELETE, as a JSON body otherwise.
    `openai`: the base, usually ending in `/v1`. `mcp`: a streamable HTTP endpoint. `openapi`: the
    server, where it is not the document's first."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    headers: dict[str, str] = Field(default_factory=dict)
    """`${NAME}` in a value stands for a secret."""
    accepted_is_result: bool = False
    """`http`, `openapi`: an answer with status 202 is the result. Otherwise it says that the result
    comes later, through a callback say, and the call fails, `declaration_misfit`."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """The JSON Schema of the arguments. `openapi` and `mcp`: taken from there if it is left out."""
    idempotent: bool = False
    """Whether a call whose outcome is unknown may be made again, under the same key."""
    attempts_max: Annotated[int, Field(ge=1, le=ATTEMPTS_MAX, strict=True)] = 1
    """How often a call that fails, and might do better, is made within its deadline."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    output_bytes_max: Annotated[int, Field(ge=1, le=OUTPUT_BYTES_MAX)] = 1 << 20
    """Above this a call fails, `output_too_large`. What is too large for a message travels through
    the object store; the agent sees no difference."""
    secrets: Annotated[list[SecretName], Field(max_length=16)] = Field(default_factory=list)
    """Names alone; the values are in the environment of the service, as `DSEC_SECRET_<NAME>`."""
    quota: Quota = Quota()
    document: str = ""
    """`openapi`: a file or a URL, read when the tool is registered. The spec keeps what it says of
    the operation."""
    operation: str = ""
    """`openapi`: an `operationId`."""
    places: dict[str, Place] = Field(default_factory=dict)
    """`openapi`: where each argument goes. Taken from the document."""
    command: str = ""
    """`mcp`: the program of a server that talks over its standard input and output."""
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    """`mcp`: variables of the program. `${NAME}` in a value stands for a secret."""
    tool: str = ""
    """`mcp`: the tool's name on the server, where it is not `name`."""
    model: str = ""
    """`openai`: the model's name on the server."""
    api: Literal["chat", "completions"] = "chat"
    stream: bool = False
    """`openai`: have the answer sent in pieces. The result is the same."""
    request: dict[str, Any] = Field(default_factory=dict)
    """`openai`: what every request has (`temperature`, `logprobs`, …); arguments come over it."""
    api_key: SecretName | None = None
    """`openai`: the name of the secret that is sent as bearer token."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        if value not in KINDS:
            told = ", ".join(f"`{kind}`" for kind in KINDS[:-1])
            raise ValueError(f"kind must be {told} or `{KINDS[-1]}`")
        return value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for name, kinds in _OF_KINDS.items():
            given = getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            )
            if given and self.kind not in kinds:
                raise ValueError(f"{name} is for kind: {' or '.join(kinds)}; leave it out")
        if self.attempts_max > 1 and not self.idempotent:
            raise ValueError(
                "attempts_max: a call may be made again only if the tool is `idempotent: true`"
            )
        self._is_somewhere()
        used = " ".join((*self.headers.values(), *self.env.values()))
        for name in SECRET_USE.findall(used):
            if name not in self.secrets:
                where = "headers" if f"${{{name}}}" in " ".join(self.headers.values()) else "env"
                raise ValueError(f"{where} use ${{{name}}}: add {name} to secrets")
        return self

    def _is_somewhere(self) -> None:
        """There is something to call."""
        if self.kind == "python" and not self.entry:
            raise ValueError("entry is missing: name FILE.py:FUNCTION")
        if self.kind == "openapi" and not self.operation:
            raise ValueError("operation is missing: name an operationId of the document")
        if self.kind == "openapi" and not (self.document or self.url):
            raise ValueError("document is missing: name the OpenAPI document's file or URL")
        if self.kind == "mcp" and bool(self.command) == bool(self.url):
            raise ValueError("give `command` for a server to start, or `url` for one that runs")
        if self.kind == "openai" and not self.model:
            raise ValueError("model is missing: name the model as the server does")
        wants_url = self.kind in ("http", "openai") or self.url
        if wants_url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url[:64]!r}")

    @property
    def secret_names(self) -> tuple[str, ...]:
        """All secrets that the tool is given."""
        return tuple(dict.fromkeys([*self.secrets, *([self.api_key] if self.api_key else [])]))

    @property
    def ships_code(self) -> bool:
        """Whether files travel with the spec."""
        if self.kind == "mcp":
            return bool(self.command) and "code" in self.model_fields_set
        return self.kind == "python"

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: Any) -> dict[str, Any]:
        # Specs are named by their bytes: a tool that does not use a later key keeps its name.
        told: dict[str, Any] = serialize(self)
        for name in _ADDED:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) == default:
                told.pop(name, None)
        return told
