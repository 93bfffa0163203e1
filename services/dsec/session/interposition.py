"""What stands between a session's user code and the process's clock, chance and entropy.

Here is what the machine asks of it, and the one that does nothing but say whose chance it is; the
others redirect the process and are no part of the session (`dsec.platform.interposition`).
"""

from __future__ import annotations

from typing import Protocol

from dsec.session import chance as chances
from dsec.session.chance import Chance


class Interposition(Protocol):
    """What stands between user code and the process's clock, chance and entropy."""

    def enter(self, chance: Chance) -> None:
        """User code of this session runs from now on."""

    def exit(self, chance: Chance) -> None:
        """User code stops running."""


class PlainInterposition:
    """Makes the session's chance the active one; whoever consults it sees it."""

    enter = staticmethod(chances.activate)
    exit = staticmethod(chances.deactivate)
