"""What every document that users write has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A document: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def not_yet(name: str, hint: str) -> ValueError:
    """What a reserved key raises."""
    return ValueError(f"{name} is reserved and not implemented yet: {hint}")
