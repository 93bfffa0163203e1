"""The state directory: where an embedded stack keeps its data, and what it knows of itself.

One supervisor at a time owns the directory, by a lock that the kernel lets go of when it dies.
What it started is written down, with creation times, so that the next start and `down` can find
what an earlier supervisor left, and can prove that it is ours before they end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import psutil
import pydantic

from dsec.platform.stack.errors import StackError, os_failure
from dsec.platform.stack.files import write_private
from dsec.platform.stack.identity import ProcessIdentity, end_process

STATE_DIR_VARIABLE = "DSEC_STATE_DIR"
STATE_VERSION = 1
# Everything inside is private; others may pass, since the database may run as another user.
STATE_DIR_MODE = 0o711
FREE_BYTES_MIN = 256 * 1024 * 1024
PASSWORD_BYTES = 24
NATS_DIRECTORY = "nats"
"""Of its server; those of a cluster's nodes begin so."""
LEFTOVER_STOP_GRACE_S = 30.0
_PASSWORDS = pydantic.TypeAdapter(dict[str, str])


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class ProcessRecord(_Record):
    """A started process; `create_time` in seconds since 1970, `stop_signal` ends it in peace."""

    name: str
    pid: int
    create_time: float
    log_path: str
    stop_signal: int = int(signal.SIGTERM)

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.create_time)


@dataclass(frozen=True)
class Endpoints:
    """Where the servers are reached: nats://…, postgresql://…, and file:///… or another store.

    The first two hold passwords and are for clients; services have users of their own.
    """

    nats_url: str
    database_url: str
    object_store_url: str


class StackRecord(_Record):
    """The content of stack.json. After a stop only the ports remain."""

    version: Literal[1] = 1
    supervisor: ProcessRecord | None = None
    endpoints: Endpoints | None = None
    processes: tuple[ProcessRecord, ...] = ()
    ports: dict[str, int] = {}


def default_state_dir() -> Path:
    """DSEC_STATE_DIR, otherwise ~/.local/share/dsec."""
    given = os.environ.get(STATE_DIR_VARIABLE)
    return Path(given) if given else Path.home() / ".local" / "share" / "dsec"


class StateDir:
    """One state directory. Reading needs no lock; everything else is done while holding it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock = filelock.FileLock(self.path / "lock", fallback_to_soft=False)

    @property
    def record_path(self) -> Path:
        return self.path / "stack.json"

    @property
    def objects_dir(self) -> Path:
        return self.path / "objects"

    @property
    def postgres_dir(self) -> Path:
        return self.path / "postgres"

    @property
    def timescale_dir(self) -> Path:
        """Programs and database with TimescaleDB; the programs see it as `/`."""
        return self.path / "timescaledb"

    def log_path(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def open(self) -> None:
        """Create the directory if need be, lock it, and check that a stack can live in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=STATE_DIR_MODE)
        except OSError as error:
            raise os_failure(self.path, "making the state directory", error) from error
        self.lock()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def lock(self) -> None:
        """Become the one that owns the directory; StackError naming the one that does."""
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise StackError(self._held_sentence()) from None
        except OSError as error:
            raise os_failure(self.path, "locking the state directory", error) from error

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()

    def _prepare(self) -> None:
        self._require_known_version()
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < FREE_BYTES_MIN:
            raise StackError(
                f"The disk that holds {self.path} is nearly full ({free_bytes // 2**20} MB free, "
                f"{FREE_BYTES_MIN // 2**20} MB needed): free some space there, or choose another "
                "state directory (DSEC_STATE_DIR)."
            )
        write_private(self.path / "VERSION", f"{STATE_VERSION}\n")
        try:
            for folder in (self.objects_dir, self.path / "logs"):
                folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise os_failure(self.path, "preparing the state directory", error) from error

    def _require_known_version(self) -> None:
        marker = self.path / "VERSION"
        try:
            text = marker.read_text().strip()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise StackError(f"{marker} cannot be read ({error}): look at the path.") from error
        if text != str(STATE_VERSION):
            raise StackError(
                f'{self.path} was written by another version of DSec (its format is "{text}", '
                f"this one knows {STATE_VERSION}): use that version, or choose another state "
                "directory (DSEC_STATE_DIR)."
            )

    def _held_sentence(self) -> str:
        record, _ = self.read()
        holder = record.supervisor if record is not None else None
        who = f" by process {holder.pid}" if holder is not None else ", and is just starting"
        return (
            f"A stack is already up on {self.path}, held{who}: use it, stop it with `dsec down`, "
            "or choose another state directory (DSEC_STATE_DIR)."
        )

    def read(self) -> tuple[StackRecord | None, str | None]:
        """stack.json, and a sentence about it if it cannot be read. Missing is (None, None)."""
        try:
            return StackRecord.model_validate_json(self.record_path.read_bytes()), None
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError):
            return None, f"{self.record_path} is damaged, and what it said is lost."

    def write(self, record: StackRecord) -> None:
        """Replace stack.json."""
        write_private(self.record_path, record.model_dump_json(indent=2) + "\n")

    def password(self) -> str:
        """The password of the embedded database's owner, made once; only the owner of the
        directory can read it."""
        path = self.path / "password"
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text().strip():
                return text
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        write_private(path, password + "\n")
        return password

    def database_passwords(self, users: Iterable[str]) -> dict[str, str]:
        """The passwords of its other users, by user: each opens what its user may do."""
        # Earlier versions kept a reader's here, which is none any more.
        (self.path / "reader-password").unlink(missing_ok=True)
        return self._kept_passwords("database-passwords.json", users)

    def nats_passwords(self, users: Iterable[str]) -> dict[str, str]:
        """Likewise, of the embedded NATS server."""
        return self._kept_passwords("nats-passwords.json", users)

    def _kept_passwords(self, name: str, users: Iterable[str]) -> dict[str, str]:
        """Each made once, in a file that only the owner can read."""
        path = self.path / name
        known: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # damaged: they are made anew
            known = _PASSWORDS.validate_json(path.read_bytes())
        made = {user: known.get(user) or secrets.token_urlsafe(PASSWORD_BYTES) for user in users}
        if made != known:
            write_private(path, json.dumps(made, indent=2) + "\n")
        return made

    async def end_leftovers(self, record: StackRecord | None) -> tuple[str, ...]:
        """End what an earlier supervisor left and is provably ours; say which. Hold the lock."""
        ended: list[str] = []
        for process in reversed(record.processes if record is not None else ()):
            if await end_process(process.identity, process.stop_signal, LEFTOVER_STOP_GRACE_S):
                ended.append(f"{process.name} (pid {process.pid})")
        for stray in self._strays():
            name = f"{stray.name()} (pid {stray.pid})"
            identity = ProcessIdentity(stray.pid, stray.create_time())
            if await end_process(identity, signal.SIGQUIT, LEFTOVER_STOP_GRACE_S):
                ended.append(name)
        return tuple(ended)

    def _strays(self) -> list[psutil.Process]:
        """Servers that run on our files, though no record names them.

        The record may be damaged, or its writer killed between a start and its writing. A second
        server on the same store would ruin it, and its command line names the store.
        """
        postgres = self.postgres_dir / "data"
        nats = [
            ("nats-server", str(path), path)
            for path in self.path.glob(f"{NATS_DIRECTORY}*/nats-server.conf")
        ]
        timescale = self.timescale_dir / "data"
        # A server's name, how its command line names its files, and where they are.
        servers = (
            *nats,
            ("postgres", str(postgres), postgres),
            ("postgres", f"/{timescale.name}", timescale),
        )
        found = []
        for process in psutil.process_iter():
            # One that ends meanwhile, or that we may not look at, is no server of ours.
            with contextlib.suppress(psutil.Error, OSError):
                name, arguments = process.name(), process.cmdline()[1:]
                if any(
                    name == server and told in arguments and _sees_as(process.pid, told, path)
                    for server, told, path in servers
                ):
                    found.append(process)
        return found


def _sees_as(pid: int, told: str, path: Path) -> bool:
    """Whether `told` means our file to a process, and not its own, of a container say."""
    if sys.platform != "linux":
        return told == str(path)
    seen = Path(f"/proc/{pid}/root{told}")
    return seen.exists() and path.exists() and seen.samefile(path)
