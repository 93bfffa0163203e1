"""What goes wrong in a run: drawn from its seed, so that the seed brings it back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.network import Weather

FAULTS_UNTIL_S = 7.0
"""Later nothing more goes wrong, so that every session can end."""
WEATHER_UNTIL_S = 12.0
SHORT_WINDOW_S = 60.0
BOUNDARY_MAX = 220
"""The highest number of a request at which a process dies."""
KINDS = ("worker", "worker", "worker", "node", "scheduler", "recorder", "reward", "tool")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at a time."""

    at_s: float
    what: str
    """`kill`, `stop`, `mute`, `deaf`, `bus_away`, `database_away`, `stream_full` or `cancel`."""
    who: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.what} {self.who}".strip() + lasts


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A request of a kind of process that is the last thing it does."""

    kind: str
    number: int
    when: str
    """`before` it leaves, or `after` it was carried out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed says of a run."""

    weather: Weather
    duplicate_window_s: float
    lost_commits_share: float
    work_s_max: float
    trim_keep_s: float
    """How long the recorder leaves in the stream what all have."""
    standby: tuple[str, ...]
    """Of what there are two."""
    sessions: tuple[tuple[int, int, int], ...]
    """Kind, seed and steps of each."""
    asked_at_s: tuple[float, ...]
    faults: tuple[Fault, ...] = ()
    crash_points: tuple[CrashPoint, ...] = field(default=())
    slow_s: tuple[tuple[float, float], ...] = ()
    """From when to when the service that reward functions ask is slow."""

    def slow(self, at_s: float) -> bool:
        """Whether a call that comes now takes long."""
        return any(begin <= at_s < end for begin, end in self.slow_s)


def plan_of(seed: int, kinds: int) -> Plan:
    """What happens in the run of a seed, among sessions of that many kinds."""
    chance = random.Random(f"plan {seed}")
    sessions = tuple(
        (chance.randrange(kinds), chance.randrange(4), chance.randint(2, 8))
        for _ in range(chance.randint(1, 4))
    )
    window_s = chance.choice((120.0, 1.0, 0.0))
    # The note that a call was begun has to stay for as long as the call may be published again
    # without the server's remembering it: a window that is short asks for a stream that is kept.
    keep_s = chance.choice((60.0, 2.0, 0.3)) if window_s > SHORT_WINDOW_S else 60.0
    return Plan(
        Weather(
            delay_s_max=chance.choice((0.001, 0.005, 0.05)),
            slow_share=chance.choice((0.0, 0.0, 0.02, 0.1)),
            slow_s_max=chance.choice((0.2, 1.0, 7.0)),
            lost_share=chance.choice((0.0, 0.0, 0.002, 0.02)),
            doubled_share=chance.choice((0.0, 0.05, 0.3)),
            ordered=chance.random() < 0.7,
            until_s=WEATHER_UNTIL_S,
        ),
        duplicate_window_s=window_s,
        lost_commits_share=chance.choice((0.0, 0.0, 0.05)),
        work_s_max=chance.choice((0.02, 0.3, 1.0)),
        trim_keep_s=keep_s,
        standby=tuple(
            k for k in ("scheduler", "recorder", "reward", "tool") if chance.random() < 0.3
        ),
        sessions=sessions,
        asked_at_s=tuple(chance.uniform(0, 1) for _ in sessions),
        faults=tuple(sorted(_faults(chance, len(sessions)), key=lambda fault: fault.at_s)),
        crash_points=tuple(
            CrashPoint(
                chance.choice(KINDS),
                chance.randint(1, BOUNDARY_MAX),
                chance.choice(("before", "after")),
            )
            for _ in range(chance.choice((0, 1, 2, 4)))
        ),
        slow_s=tuple(_spells(random.Random(f"modes {seed}"))),
    )


def _spells(chance: random.Random) -> Iterator[tuple[float, float]]:
    """When the service that rewards ask is slow: not at all, or a few times."""
    at_s = 0.0
    for _ in range(chance.choice((0, 1, 3, 6))):
        begin_s = at_s + chance.choice((0.0, chance.uniform(0.0, 3.0)))
        at_s = begin_s + chance.choice((0.5, 2.0, 6.0))
        yield begin_s, at_s


def _faults(chance: random.Random, sessions: int) -> list[Fault]:
    found = []
    for _ in range(chance.choice((0, 1, 2, 3, 5))):
        at_s = chance.triangular(0.3, FAULTS_UNTIL_S, 1.5)
        what = chance.choice(
            ("kill", "kill", "kill", "stop", "stop", "mute", "deaf", "bus_away", "database_away")
        )
        if what == "kill":
            found.append(Fault(at_s, what, chance.choice(KINDS)))
            if chance.random() < 0.3:  # two at once now and then
                found.append(Fault(at_s, what, chance.choice(KINDS)))
        elif what == "mute":
            found.append(Fault(at_s, what, "worker", chance.uniform(1.5, 5.0)))
        elif what in ("stop", "deaf"):
            found.append(Fault(at_s, what, chance.choice(KINDS), chance.uniform(0.2, 8.0)))
        else:
            found.append(Fault(at_s, what, for_s=chance.uniform(0.1, 3.0)))
    if chance.random() < 0.15:
        at_s = chance.triangular(0.3, FAULTS_UNTIL_S, 1.5)
        found.append(Fault(at_s, "stream_full", for_s=chance.uniform(0.1, 3.0)))
    for number in range(sessions):
        if chance.random() < 0.12:
            found.append(Fault(chance.uniform(0.2, FAULTS_UNTIL_S), "cancel", str(number)))
    return found


def undisturbed_plan(sessions: tuple[tuple[int, int, int], ...]) -> Plan:
    """Nothing goes wrong."""
    return Plan(Weather(), 120.0, 0.0, 0.001, 60.0, (), sessions, tuple(0.0 for _ in sessions))
