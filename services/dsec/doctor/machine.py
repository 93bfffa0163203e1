"""The machine: kernel, processors, memory, limits; and the Python with its packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

import psutil

from dsec.doctor.finding import Finding

MEMORY_BYTES_MIN = 512 << 20
MEMORY_BYTES_GOOD = 2 << 30
SHARED_MEMORY_BYTES_GOOD = 64 << 20
FILES_GOOD = 4096
GLIBC_MIN = (2, 28)
PYTHON_MIN = (3, 11)
_CGROUP = Path("/sys/fs/cgroup")
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^;\s]+)\s*(;.*)?")


def kernel() -> Finding:
    """The operating system and the C library that the servers' binaries need."""
    system, release = platform.system(), platform.release()
    libc, version = platform.libc_ver()
    facts = {
        "system": system,
        "release": release,
        "machine": platform.machine(),
        "libc": f"{libc} {version}".strip(),
    }
    told = f"{system} {release} on {facts['machine']}"
    if system == "Darwin":
        return Finding(
            "warn",
            f"{told}: the tests run on Linux only.",
            "Try `dsec demo`; children of a supervisor that was killed end later here.",
            facts,
        )
    if system != "Linux":
        return Finding("fail", f"{told} is not supported.", "Use Linux, or macOS.", facts)
    if libc == "glibc" and tuple(map(int, version.split(".")[:2])) < GLIBC_MIN:
        return Finding(
            "fail",
            f"{told} has glibc {version}; the embedded servers need 2.28.",
            "Use a newer distribution, or give the URLs of servers of your own.",
            facts,
        )
    return Finding("ok", f"{told}, {facts['libc'] or 'C library unknown'}.", "", facts)


def python() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    facts = {"version": version, "implementation": platform.python_implementation()}
    if sys.version_info < PYTHON_MIN or facts["implementation"] != "CPython":
        return Finding(
            "fail",
            f"{facts['implementation']} {version} is not supported.",
            "Make a virtual environment with CPython 3.11 or newer.",
            facts,
        )
    return Finding("ok", f"CPython {version}.", "", facts)


def packages() -> Finding:
    """Whether the installed packages are the ones that DSec was tested with."""
    try:
        wanted = _pins()
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "warn",
            "The package dsec is not installed, so the versions it needs are not known.",
            "Install it: `pip install -e ./contracts -e .` in a source tree.",
        )
    other = {}
    for name, version in wanted.items():
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if found != version:
            other[name] = {"wanted": version, "found": found or None}
    if not other:
        return Finding("ok", f"All {len(wanted)} pinned packages have their version.")
    missing = [name for name, pair in other.items() if pair["found"] is None]
    told = ", ".join(f"{n} {p['found'] or 'missing'} ({p['wanted']})" for n, p in other.items())
    return Finding(
        "fail" if missing else "warn",
        f"Packages are not as pinned: {told}.",
        "Install them: `pip install` DSec anew in a virtual environment of its own.",
        {"different": other},
    )


def _pins() -> dict[str, str]:
    found = {}
    for requirement in importlib.metadata.requires("dsec") or ():
        matched = _PIN.fullmatch(requirement.strip())
        if matched and "extra ==" not in (matched[3] or ""):
            found[matched[1]] = matched[2]
    return found


def memory() -> Finding:
    """Memory, as the container limits it, and how many processors may be used."""
    machine = psutil.virtual_memory()
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    total = min(machine.total, limit or machine.total)
    free = min(machine.available, limit - (used or 0) if limit else machine.available)
    facts = {"total_bytes": total, "available_bytes": free, "processors": _processors()}
    told = f"{_mb(free)} of {_mb(total)} free, {facts['processors']:g} processors"
    if free < MEMORY_BYTES_MIN:
        return Finding(
            "fail",
            f"{told}: not enough for the servers and a worker.",
            f"Free some memory: {_mb(MEMORY_BYTES_MIN)} at the least.",
            facts,
        )
    if free < MEMORY_BYTES_GOOD:
        return Finding("warn", f"{told}.", "Run few workers (`dsec up --workers 1`).", facts)
    return Finding("ok", f"{told}.", "", facts)


def limits() -> Finding:
    """Open files and shared memory, which containers keep small."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/dev/shm")
    shared = psutil.disk_usage(str(folder)).free if folder.is_dir() else None
    facts = {"files_soft": soft, "files_hard": hard, "shared_memory_bytes": shared}
    if soft != resource.RLIM_INFINITY and soft < FILES_GOOD:
        return Finding(
            "warn",
            f"A process may open {soft} files.",
            f"Raise it (`ulimit -n {FILES_GOOD}`), or many sessions will not fit.",
            facts,
        )
    if shared is not None and shared < SHARED_MEMORY_BYTES_GOOD:
        return Finding(
            "warn",
            f"Shared memory (/dev/shm) has {_mb(shared)} free.",
            "Give the container more (`--shm-size 256m`): PostgreSQL needs it for large queries.",
            facts,
        )
    return Finding("ok", f"A process may open {soft} files.", "", facts)


def _cgroup_bytes(name: str) -> int | None:
    """A limit of the container, where there is one."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _processors() -> float:
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return min(float(mine), int(quota) / int(period))
    except (OSError, ValueError):
        return float(mine)


def _mb(count: float) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
