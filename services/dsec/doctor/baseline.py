"""The determinism baseline: a few short sessions whose chain hashes were committed with DSec.

Run as a program it prints what this machine gives, in JSON; with `--write` it records that as the
baseline of the library set that is installed, in `baseline.json` beside this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.doctor.finding import Finding

BASELINE = Path(__file__).with_name("baseline.json")
RUN_WAIT_S = 60.0
DEADLINE_S = 70.0
LIBRARIES = ("gymnasium", "numpy")
SEED = 7
STEPS = 200
ENVIRONMENTS = ("CartPole-v1", "FrozenLake-v1")
_WRITE = "--write"


def baseline() -> Finding:
    """Run the sessions twice here, and compare them with each other and with the committed."""
    try:
        ran = [_run_apart(), _run_apart()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return Finding(
            "fail",
            f"The built-in sessions cannot be run here ({told.strip().splitlines()[-1]}).",
            "Install DSec anew in a virtual environment of its own.",
        )
    known = json.loads(BASELINE.read_text(encoding="utf-8"))
    return compare(ran[0], ran[1], known["baselines"])


def compare(
    ran: Mapping[str, Any], again: Mapping[str, Any], known: list[Mapping[str, Any]]
) -> Finding:
    """What two runs of the sessions mean, beside the committed baselines."""
    seen = dict(ran)
    if ran["sessions"] != again["sessions"]:
        return Finding(
            "fail",
            f"Two equal runs differ on this machine: {_differing(ran, again)}.",
            "Look for a faulty memory or processor, or a patched numpy: nothing that runs here "
            "can be verified.",
            {**seen, "again": again["sessions"]},
        )
    matching = [each for each in known if each["sessions"] == ran["sessions"]]
    if matching:
        return Finding(
            "ok", f"{len(ran['sessions'])} built-in sessions have their committed hashes.", "", seen
        )
    nearest = min(known, key=lambda each: len(_other_versions(ran, each)))
    other = _other_versions(ran, nearest)
    seen["different_versions"] = other
    told = _differing(ran, nearest)
    if not other:
        return Finding(
            "fail",
            f"{told} came out otherwise than committed, with the same versions.",
            "Report it with what `dsec doctor --json` prints; sessions of other machines will "
            "not verify here.",
            seen,
        )
    listed = ", ".join(f"{n} {p['here'] or 'none'} ({p['baseline']})" for n, p in other.items())
    return Finding(
        "warn",
        f"{told} came out otherwise than committed; different here: {listed}.",
        "Sessions verify on machines that are alike; install the pinned versions to verify those "
        "of others.",
        seen,
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = sorted({*one["sessions"], *other["sessions"]})
    return ", ".join(n for n in names if one["sessions"].get(n) != other["sessions"].get(n))


def _other_versions(
    ran: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, dict[str, str | None]]:
    here, there = ran["versions"], known["versions"]
    return {
        name: {"here": here.get(name), "baseline": there.get(name)}
        for name in (*there, *(n for n in here if n not in there))
        if here.get(name) != there.get(name)
    }


def versions() -> dict[str, str]:
    """What may change the results: the interpreter, libraries, processor and C library."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def _run_apart() -> dict[str, Any]:
    """In a process of its own, with the clocks and generators of a worker."""
    from dsec.platform.user_environment import of_sessions

    ran = subprocess.run(
        [sys.executable, "-m", "dsec.doctor.baseline"],
        capture_output=True,
        text=True,
        timeout=RUN_WAIT_S / 2,
        check=True,
        env=of_sessions(os.environ),
    )
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def run_here() -> dict[str, Any]:
    """Run every session in this process. Installs the virtual clocks for good."""
    from dsec.doctor.baseline_session import chain_of
    from dsec.platform import virtual

    virtual.install()
    return {
        "versions": versions(),
        "sessions": {name: chain_of(name, SEED, STEPS) for name in ENVIRONMENTS},
    }


def write(ran: Mapping[str, Any]) -> None:
    """Record a run as the baseline of its versions, in place of an older one of the same."""
    known = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    kept = [each for each in known.get("baselines", []) if each["versions"] != ran["versions"]]
    text = json.dumps({"seed": SEED, "steps": STEPS, "baselines": [*kept, ran]}, indent=2)
    BASELINE.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    told = run_here()
    if _WRITE in sys.argv[1:]:
        write(told)
    sys.stdout.write(f"{json.dumps(told)}\n")
