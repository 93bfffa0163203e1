"""Accelerators: what the driver says, and whether the installed torch can use it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dsec.doctor.finding import Finding

ASK_WAIT_S = 20.0
DEADLINE_S = 50.0
DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")
_FIELDS = ("name", "driver_version", "memory.total")
_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": names}))
"""


def gpu() -> Finding:
    """GPUs and their driver; absent where there is none."""
    devices = _smi()
    if devices is None:
        return _torch_only()
    if isinstance(devices, str):
        return Finding(
            "fail",
            f"There is a driver for NVIDIA GPUs, and it does not answer ({devices}).",
            "Reinstall the driver, or restart the machine after its update.",
        )
    facts: dict[str, object] = {"devices": devices}
    told = ", ".join(f"{d['name']} ({d['memory.total']})" for d in devices)
    driver = devices[0]["driver_version"] if devices else ""
    seen = _torch()
    if seen is not None:
        facts["torch"] = seen
        if not seen["devices"]:
            return Finding(
                "warn",
                f"{told}, driver {driver}; torch {seen['torch']} does not see it.",
                "Install the build of torch for this driver, if agents shall use it.",
                facts,
            )
    return Finding("ok", f"{told}, driver {driver}.", "", facts)


def _torch_only() -> Finding:
    # Importing torch takes seconds, so it is not asked about a device that cannot be there.
    there = sys.platform == "darwin" or any(Path(path).exists() for path in DEVICES)
    seen = _torch() if there else None
    if seen is None or not seen["devices"]:
        return Finding("absent", "No GPU: agents run on processors.", "", {"torch": seen})
    return Finding("ok", f"torch {seen['torch']} sees {', '.join(seen['devices'])}.", "", seen)


def _smi() -> list[dict[str, str]] | str | None:
    """What nvidia-smi lists; a text where it fails, None where it is not there."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    command = [path, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_WAIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if ran.returncode != 0:
        return (ran.stdout + ran.stderr).strip().partition("\n")[0] or "it gives no reason"
    rows = [line.split(", ") for line in ran.stdout.strip().splitlines()]
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows]


def _torch() -> dict[str, list[str]] | None:
    """What torch says, asked in a process of its own: importing it takes seconds, and may hang."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TORCH],
            capture_output=True,
            text=True,
            timeout=ASK_WAIT_S,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        told: dict[str, list[str]] = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return told
