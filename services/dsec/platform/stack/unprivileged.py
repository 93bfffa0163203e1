"""How PostgreSQL is run, which refuses to be root, or a user that has no account.

An ordinary user with an account needs nothing. Root (in a container, mostly) and a user without
an account (where a platform picks the number) start it in a user namespace, in which they go by
the number of an account that exists: files stay theirs and no account is made. Where namespaces
are forbidden, root starts it as that account, which then must be able to reach the files.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.process import ProcessSpec, run_to_end

NAMESPACE_TOOL = "unshare"
NAMESPACE_PROBE_WITHIN_S = 10.0
NOBODY_USER_ID = 65534


@dataclass(frozen=True)
class Unprivileged:
    """What is put before a command line, and the user that it is started as (None: our own)."""

    prefix: tuple[str, ...] = ()
    user_id: int | None = None

    @classmethod
    async def choose(cls, probe_log_path: Path) -> Unprivileged:
        """The way that this machine allows; StackError when there is none."""
        own_id = os.geteuid()
        accounts = {entry.pw_uid for entry in pwd.getpwall()}
        if own_id != 0 and own_id in accounts:
            return cls()
        stand_in = _stand_in(accounts)
        prefix = (
            NAMESPACE_TOOL,
            "-U",
            f"--map-user={stand_in}",
            f"--map-group={stand_in}",
        )
        if await _works(prefix, probe_log_path):
            return cls(prefix)
        if own_id == 0:
            return cls(user_id=stand_in)
        raise StackError(
            f"PostgreSQL needs a user with an account, the user {own_id} has none, and this "
            "machine forbids user namespaces: add the user to /etc/passwd, or give the URL of a "
            "PostgreSQL of your own."
        )

    def argv(self, *command: str) -> tuple[str, ...]:
        """The command line to start."""
        return (*self.prefix, *command)

    def own(self, path: Path) -> None:
        """Hand `path` to the user that the programs are started as."""
        if self.user_id is not None:
            os.chown(path, self.user_id, self.user_id)

    def require_reach(self, *paths: Path) -> None:
        """Raise StackError when that user cannot reach one of the paths."""
        if self.user_id is None:
            return
        for path in paths:
            closed = _closed_folder_above(path)
            if closed is not None:
                raise StackError(
                    f"PostgreSQL refuses to run as root, this machine forbids user namespaces, "
                    f"and the user {self.user_id} cannot reach {path} because {closed} is "
                    f"closed to others: open it (chmod o+x {closed}), start the stack as an "
                    "ordinary user, or give the URL of a PostgreSQL of your own."
                )


def _stand_in(accounts: set[int]) -> int:
    """An account other than root; small images have none but nobody."""
    ordinary = accounts - {0}
    return NOBODY_USER_ID if NOBODY_USER_ID in ordinary else min(ordinary, default=NOBODY_USER_ID)


async def _works(prefix: tuple[str, ...], log_path: Path) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    probe = ProcessSpec(name=prefix[0], argv=(*prefix, "true"), log_path=log_path)
    try:
        await run_to_end(probe, NAMESPACE_PROBE_WITHIN_S)
    except StackError:
        return False
    finally:
        log_path.unlink(missing_ok=True)
    return True


def _closed_folder_above(path: Path) -> Path | None:
    for folder in reversed(path.resolve().parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None
