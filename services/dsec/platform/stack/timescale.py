"""PostgreSQL with TimescaleDB on one machine: the distribution's packages in a private root.

There is no TimescaleDB on pip, and installing the package would upgrade the C library of an older
system with it. So the packages and every library they need are unpacked into a folder, once, and
the programs see that folder as `/`. They are started in a user namespace, which needs no root;
where namespaces are forbidden, as in many containers, root starts them with a changed root.

`/dev/null` in there is an ordinary file: making devices needs root, and all that initdb does with
it is to throw a few lines away.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from dsec.platform.stack.debian import PackageFetcher, this_distribution
from dsec.platform.stack.errors import StackError, os_failure
from dsec.platform.stack.files import write_private
from dsec.platform.stack.process import ProcessSpec, run_to_end
from dsec.platform.stack.programs import Programs
from dsec.platform.stack.unprivileged import NAMESPACE_TOOL, NOBODY_USER_ID, Unprivileged

INSTEAD = (
    "give the URL of a TimescaleDB of your own (`dsec up --database-url`, DSEC_UP_DATABASE_URL), "
    "or run on plain PostgreSQL: `dsec up`"
)
LAYOUT_VERSION = 1
MARKER = "UNPACKED"
POSTGRES = "postgres"
SHELL = "dash"
"""initdb starts `postgres` through a shell."""
PROBE_WITHIN_S = 30.0
FOLDER_MODE = 0o711

SETTINGS = {
    "shared_preload_libraries": "timescaledb",
    "timescaledb.telemetry_level": "off",
    # The other method keeps files in a /dev/shm, which the root does not have.
    "dynamic_shared_memory_type": "sysv",
    # A statement over all sessions locks each chunk and its indexes, and ten years have 122.
    "max_locks_per_transaction": "256",
}
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin", "LC_ALL": "C.UTF-8"}
_PACKAGE = re.compile(r"postgresql-(\d+)-timescaledb")
_LINKS = ("bin", "lib", "lib64", "sbin")
_FILES = {
    "etc/passwd": f"postgres:x:{NOBODY_USER_ID}:{NOBODY_USER_ID}::/:/bin/sh\n",
    "etc/group": f"postgres:x:{NOBODY_USER_ID}:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "dev/null": "",
}


async def timescale_programs(
    root: Path, log_path: Path, on_progress: Callable[[str], None]
) -> Programs:
    """PostgreSQL with TimescaleDB in `root`, fetched if it is not there yet.

    Raises:
        StackError: it cannot be had on this machine; says what to do instead.
    """
    marker = root / MARKER
    try:
        complete = marker.read_text().strip() == str(LAYOUT_VERSION)
    except FileNotFoundError:
        complete = False
    except OSError as error:
        raise os_failure(marker, "preparing TimescaleDB", error) from error
    if not complete:
        await _make_root(root, log_path, on_progress)
        write_private(marker, f"{LAYOUT_VERSION}\n")
    return await _entered(root, log_path)


async def _make_root(root: Path, log_path: Path, on_progress: Callable[[str], None]) -> None:
    distribution = this_distribution(INSTEAD)
    on_progress(
        f"Fetching TimescaleDB from the packages of {distribution.name} {distribution.suite} into "
        f"{root}, once (about 40 MB, 115 MB unpacked; nothing is installed on the system)."
    )
    try:
        root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        _remove_unpacked(root)
    except OSError as error:
        raise os_failure(root, "preparing TimescaleDB", error) from error
    packages = PackageFetcher(root / "apt", log_path, distribution)
    try:
        await packages.update()
        package = package_for(root / "data", await packages.names("postgresql-"))
        await packages.download(package, SHELL)
    except StackError as error:
        raise StackError(
            f"TimescaleDB cannot be fetched from the packages of {distribution.name} "
            f"{distribution.suite}: look at the network and at {log_path}, or {INSTEAD}. "
            f"What happened: {error}"
        ) from error
    await packages.unpack(root)
    packages.remove()
    try:
        _furnish(root)
    except OSError as error:
        raise os_failure(root, "preparing TimescaleDB", error) from error


def package_for(data_dir: Path, names: Iterable[str]) -> str:
    """The package of TimescaleDB for a database, or else for the newest PostgreSQL there is.

    Raises:
        StackError: this release has none.
    """
    found = {match[1]: match[0] for match in map(_PACKAGE.fullmatch, names) if match}
    try:
        made_by = (data_dir / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        made_by = max(found, key=int, default="*")
    if made_by not in found:
        raise StackError(f"this release has no package postgresql-{made_by}-timescaledb.")
    return found[made_by]


def _remove_unpacked(root: Path) -> None:
    """What an interrupted start left; the database is not among it."""
    shutil.rmtree(root / "usr", ignore_errors=True)
    (root / MARKER).unlink(missing_ok=True)


def _furnish(root: Path) -> None:
    """What programs expect of a system beside /usr."""
    for name in _LINKS:
        link = root / name
        link.unlink(missing_ok=True)
        (root / "usr" / name).mkdir(exist_ok=True)
        link.symlink_to(f"usr/{name}")
    shell = root / "usr" / "bin" / "sh"
    if not shell.exists():
        shell.symlink_to(SHELL)
    for path, content in _FILES.items():
        file = root / path
        file.parent.mkdir(exist_ok=True, mode=0o755)
        file.write_text(content)
        file.chmod(0o644)
    (root / "dev" / "null").chmod(0o666)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)


async def _entered(root: Path, log_path: Path) -> Programs:
    """How the programs in there are run on this machine; StackError when it forbids all ways."""
    try:
        folder = next(root.glob("usr/lib/postgresql/*/bin/postgres")).parent.relative_to(root)
    except StopIteration:
        raise StackError(
            f"{root} holds no PostgreSQL: delete {root / MARKER}, and the next start fetches one."
        ) from None
    inside = Programs(
        folder=Path("/") / folder,
        runner=Unprivileged(
            (
                NAMESPACE_TOOL,
                "-U",
                f"--map-user={NOBODY_USER_ID}",
                f"--map-group={NOBODY_USER_ID}",
                f"--root={root}",
                "--wd=/",
            )
        ),
        env=_ENVIRONMENT,
        settings=SETTINGS,
        root=root,
    )
    failure = await _failure(inside, log_path)
    if failure is None:
        return inside
    if os.geteuid() != 0:
        raise StackError(
            f"TimescaleDB runs in a user namespace, which this machine forbids ({failure}): start "
            f"the stack as root, or {INSTEAD}."
        )
    changed = replace(inside, runner=Unprivileged(user_id=NOBODY_USER_ID), changes_root=True)
    failure = await _failure(changed, log_path)
    if failure is None:
        return changed
    raise StackError(f"PostgreSQL does not start in {root} ({failure}): {INSTEAD}.")


async def _failure(programs: Programs, log_path: Path) -> StackError | None:
    """Why the programs cannot be run this way, if they cannot."""
    spec = ProcessSpec(
        name="timescaledb",
        argv=programs.argv(POSTGRES, "--version"),
        log_path=log_path,
        env=programs.env,
        user_id=programs.runner.user_id,
        root=programs.root if programs.changes_root else None,
    )
    try:
        await run_to_end(spec, PROBE_WITHIN_S)
    except StackError as error:
        return error
    return None
