"""Places at which a test can end a process: right before a publish, a commit, a put or an
acknowledgement, and right after it.

What is done before such a place and what after it is all that a crash can tear apart, so a test
that ends each process at each of them, one at a time, has tried every crash there is. Outside of
tests this costs a comparison: without the environment variable nothing is looked up.

A test names a folder in `CRASH_POINTS`. Each process writes the names that it reaches into its file
`reached`; where a file of such a name lies in the folder, the process that reaches the place takes
it away and is killed. The file may hold a number: at which time in that process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

VARIABLE = "CRASH_POINTS"
_folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
_times: Counter[str] = Counter()
_kill = os.kill  # the process's own may be guarded against user code by then


def reached(place: str) -> None:
    """The process is at a place, such as `publish.session.stepped.before`."""
    if _folder is not None:
        _reached(_folder, f"{_role()}.{place}")


def _reached(folder: Path, name: str) -> None:
    _times[name] += 1
    if _times[name] == 1:
        with (folder / "reached").open("a") as file:
            file.write(f"{name}\n")
    try:
        wanted = int((folder / name).read_text() or 1)
    except FileNotFoundError:
        return
    if _times[name] < wanted:
        return
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return  # another process of this kind took it
    _kill(os.getpid(), signal.SIGKILL)


def _role() -> str:
    """What this process is: `recorder`, `worker`, ..."""
    if "--worker" in sys.argv:
        return "worker"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.split(".")[1] if spec is not None and "." in spec.name else "client"
