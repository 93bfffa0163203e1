"""What users of DSec import: `Agent`, `StateAnchor`, `reward`, `Transition`, `Client`.

Everything is loaded when it is first asked for: agents import this package inside workers, where
a database driver has no business, and the command line must answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsec.agent import Agent
    from dsec.client.client import Client, Group
    from dsec.client.episodes import Episode
    from dsec.reward.declaration import Transition
    from dsec.reward.declaration import declare as reward
    from dsec.session.state_anchor import StateAnchor

__all__ = ["Agent", "Client", "Episode", "Group", "StateAnchor", "Transition", "reward"]

_PLACES = {
    "Agent": "dsec.agent",
    "Client": "dsec.client.client",
    "Group": "dsec.client.client",
    "Episode": "dsec.client.episodes",
    "StateAnchor": "dsec.session.state_anchor",
    "Transition": "dsec.reward",
}


def __getattr__(name: str) -> Any:
    if name == "reward":  # the package is also the decorator
        return importlib.import_module("dsec.reward")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'dsec' has no attribute {name!r}")
    return getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
