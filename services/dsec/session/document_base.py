"""What every document that users write has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A document: frozen, no unknown keys, and numbers are numbers: no NaN, no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def not_yet(name: str, hint: str) -> ValueError:
    """What a reserved key raises."""
    return ValueError(f"{name} is reserved and not implemented yet: {hint}")
