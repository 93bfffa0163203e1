"""What a check found, and how checks are run: at once, each within its deadline, none with another.

A check is a plain function on a thread of its own. A disk that hangs or a library that never
returns then costs its own check the answer, and nothing else: the thread is left behind, and does
not keep the process alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Literal

from dsec.doctor.hiding import Hidden

Status = Literal["ok", "warn", "fail", "absent"]
CHECK_DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    `absent`: there is nothing to check, or it cannot be seen. `advice` says what to do; it is
    empty where there is nothing to do. `facts` are in JSON's types.
    """

    status: Status
    sentence: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Unseen(Exception):
    """What a check needs could not be had, for a reason that another check tells."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named question to this machine."""

    name: str
    run: Callable[[], Finding]
    deadline_s: float = CHECK_DEADLINE_S


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with its check's name and what it took."""

    name: str
    status: Status
    sentence: str
    advice: str
    facts: Mapping[str, Any]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The documented keys."""
        return asdict(self)


class _Running:
    """A check on its thread."""

    def __init__(self, check: Check, hidden: Hidden) -> None:
        self._check = check
        self._hidden = hidden
        self._began = monotonic()
        self._found: tuple[Finding, float] | None = None
        self._thread = threading.Thread(target=self._work, name=check.name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            finding = self._check.run()
        except Unseen as error:
            finding = Finding("absent", self._hidden.hide(str(error)))
        except Exception as error:  # noqa: BLE001 - a check that breaks is one that failed
            told = self._hidden.hide(f"{type(error).__name__}: {error}")
            finding = Finding(
                "fail",
                f"This check itself broke ({told}).",
                "Report it with what `dsec doctor --json` prints.",
            )
        self._found = finding, monotonic() - self._began

    def result(self) -> Result:
        """Wait for it, up to its deadline."""
        check = self._check
        self._thread.join(max(0.0, self._began + check.deadline_s - monotonic()))
        finding, seconds = self._found or (
            Finding(
                "fail",
                f"No answer within {check.deadline_s:.0f} s.",
                "Something that it asks hangs: a disk, a server or a driver.",
            ),
            check.deadline_s,
        )
        return Result(
            check.name,
            finding.status,
            finding.sentence,
            finding.advice,
            finding.facts,
            round(seconds, 3),
        )


def examine(checks: Iterable[Check], hidden: Hidden) -> list[Result]:
    """Run all checks at once. Returns their results in the order of the checks."""
    running = [_Running(check, hidden) for check in checks]
    return [each.result() for each in running]
