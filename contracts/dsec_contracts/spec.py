"""Specs and policies: documents and weights that are registered once and named by their hash."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dsec_contracts.envelope import Event, Part
from dsec_contracts.session import Hash, Name, ShortText

SpecKind = Literal["agent", "env", "reward", "tool"]


class SpecFact(Part):
    """One spec: canonical bytes of `{kind, document, files}`, and their hash.

    `files` maps relative paths to source bytes: the code travels with the spec, so a hash pins
    what ran. `blob` is the object store's key where the bytes are too large for a message.
    """

    spec_hash: Hash
    kind: SpecKind
    content: bytes = b""
    blob: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.blob is None and hashlib.sha256(self.content).hexdigest() != self.spec_hash:
            raise ValueError("spec_hash is not the SHA-256 of content")
        return self


class SpecCircumstance(Part):
    """For people, and for those who must not look into a spec."""

    name: ShortText = ""
    services: Annotated[list[ShortText], Field(max_length=64)] = Field(
        default_factory=list, exclude_if=lambda services: not services
    )
    """The outside services that a reward function asks."""
    per_episode: bool = Field(default=False, exclude_if=lambda whole: not whole)
    """Of a reward function: it scores whole episodes."""


class SpecRegistered(Event):
    """An agent, environment, reward or tool spec became known."""

    fact: SpecFact
    circumstance: SpecCircumstance = SpecCircumstance()


class PolicyFact(Part):
    """One version of a policy's weights: `name@version`."""

    name: Name
    version: Name
    content_hash: Hash
    blob: str
    """The object store's key."""
    size_bytes: int


class PolicyCircumstance(Part):
    """For people."""

    client: ShortText | None = None


class PolicyPublished(Event):
    """A trainer published new weights."""

    fact: PolicyFact
    circumstance: PolicyCircumstance = PolicyCircumstance()
