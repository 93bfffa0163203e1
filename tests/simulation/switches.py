"""Guards of the simulated world that can be switched off, to see that the simulation misses them.

Each names what it stands for in the real one. With all on, no seed may fail; with one off, some
must (`guards.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Switches:
    """Which guards there are."""

    fence: bool = True
    """The server refuses a fenced worker's publishes."""
    expected_sequence: bool = True
    """The server refuses a placement that builds on another than the last."""
    natural_key: bool = True
    """The log has a row once."""
    floor_wait: bool = True
    """Whoever waits for the floor gets it."""

    def without(self, guard: str) -> Switches:
        """All but one."""
        return replace(self, **{guard: False})
