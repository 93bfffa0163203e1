"""Where the embedded stack would live: its disk and its ports."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import psutil

from dsec.doctor.finding import Finding
from dsec.platform.stack.ports import LOOPBACK, bind_error
from dsec.platform.stack.state import StateDir
from dsec.platform.stack.status import stack_status

DISK_BYTES_MIN = 1 << 30
DISK_BYTES_GOOD = 16 << 30
"""The stream may grow to 8 GB, the write-ahead log to 4."""
SYNC_MS_GOOD = 20.0
SYNCS = 16
SYNC_BYTES = 4096
LOOPBACK_WAIT_S = 2.0
NETWORK_DISKS = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "gluster", "lustre", "afs")


def disk(state_dir: Path) -> Finding:
    """Free space, the kind of disk, and how long a sync takes."""
    folder = _existing(state_dir.expanduser().absolute())
    free = psutil.disk_usage(str(folder)).free
    kind = _file_system(folder)
    facts: dict[str, object] = {"path": str(folder), "free_bytes": free, "file_system": kind}
    told = f"{folder} has {free / 2**30:.1f} GB free on {kind or 'an unknown file system'}"
    if not os.access(folder, os.W_OK):
        return Finding(
            "fail", f"{folder} cannot be written.", "Set DSEC_STATE_DIR to another one.", facts
        )
    sync_ms = _sync_ms(folder)
    facts["sync_ms"] = sync_ms
    told += f", a sync takes {sync_ms:.1f} ms"
    if free < DISK_BYTES_MIN:
        return Finding("fail", f"{told}.", "Free some space, or set DSEC_STATE_DIR.", facts)
    advice = []
    if free < DISK_BYTES_GOOD:
        advice.append(f"have {DISK_BYTES_GOOD >> 30} GB free for long runs")
    if kind.startswith(NETWORK_DISKS):
        advice.append("put the state directory on a local disk")
    if kind in ("tmpfs", "ramfs"):
        advice.append("put the state directory on a disk: this one is lost at a restart")
    if sync_ms > SYNC_MS_GOOD:
        advice.append("use a faster disk: every commit of the log waits for a sync")
    if advice:
        sentence = "; ".join(advice)
        return Finding("warn", f"{told}.", f"{sentence[0].upper()}{sentence[1:]}.", facts)
    return Finding("ok", f"{told}.", "", facts)


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _file_system(folder: Path) -> str:
    mounts = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    return next((mounts[str(f)] for f in (folder, *folder.parents) if str(f) in mounts), "")


def _sync_ms(folder: Path) -> float:
    """The median of a few syncs of a small file, in milliseconds."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            file.write(bytes(SYNC_BYTES))
            file.flush()
            began = perf_counter()
            os.fsync(file.fileno())
            taken.append(perf_counter() - began)
    return round(1000 * statistics.median(taken), 3)


def ports(state_dir: Path) -> Finding:
    """Whether loopback works, and whether the ports that the stack had are free or its own."""
    _connect_over_loopback()
    record, problem = StateDir(state_dir).read()
    remembered = dict(record.ports) if record is not None else {}
    facts = {"ports": remembered}
    if problem is not None:
        return Finding("warn", problem, "Nothing: `dsec up` picks its ports anew.", facts)
    if stack_status(state_dir).state != "stopped":
        return Finding("ok", f"The stack's own servers have their ports{_listed(remembered)}.")
    taken = {name: port for name, port in remembered.items() if bind_error(port) is not None}
    if taken:
        return Finding(
            "warn",
            f"Ports that the stack had are taken by others{_listed(taken)}.",
            "Nothing, `dsec up` picks free ones; but clients with a fixed URL will not find it.",
            {**facts, "taken": taken},
        )
    return Finding("ok", f"Loopback works, ports are free{_listed(remembered)}.", "", facts)


def _listed(found: dict[str, int]) -> str:
    return f": {', '.join(f'{name} {port}' for name, port in found.items())}" if found else ""


def _connect_over_loopback() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
        socket.create_connection(address, timeout=LOOPBACK_WAIT_S).close()
