"""The outside services that a reward function may ask: none yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class NoServiceDeclared(LookupError):
    """A reward function asked for a service, and none is declared."""


class Services(Mapping[str, Any]):
    """The outside services of a reward function: none yet. Read-only and empty."""

    def __getitem__(self, name: str) -> Any:
        raise NoServiceDeclared(f"no service is declared, so there is no {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Refused like any look-up: a default would hide that the service is missing."""
        return self[name]

    def __contains__(self, name: object) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
