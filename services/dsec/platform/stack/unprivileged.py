"""How PostgreSQL is run, which refuses to be root.

As an ordinary user there is nothing to do. As root (in a container, mostly) it is started in a
user namespace where root is called user 1000: files stay root's and no account is made. Where
namespaces are forbidden it runs as the user nobody, who then must be able to reach the files.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.process import ProcessSpec, run_to_end

NAMESPACE_TOOL = "unshare"
NAMESPACE_USER_ID = 1000
NOBODY_USER_ID = 65534
NAMESPACE_PROBE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Unprivileged:
    """What is put before a command line, and the user that it is started as (None: our own)."""

    prefix: tuple[str, ...] = ()
    user_id: int | None = None

    @classmethod
    async def choose(cls, probe_log_path: Path) -> Unprivileged:
        """The way that this machine allows."""
        if os.geteuid() != 0:
            return cls()
        unshare = shutil.which(NAMESPACE_TOOL)
        if unshare is not None:
            prefix = (
                unshare,
                "-U",
                f"--map-user={NAMESPACE_USER_ID}",
                f"--map-group={NAMESPACE_USER_ID}",
            )
            probe = ProcessSpec(name="unshare", argv=(*prefix, "true"), log_path=probe_log_path)
            try:
                await run_to_end(probe, NAMESPACE_PROBE_WITHIN_S)
            except StackError:
                pass
            else:
                return cls(prefix)
            finally:
                probe_log_path.unlink(missing_ok=True)
        return cls(user_id=NOBODY_USER_ID)

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


def _closed_folder_above(path: Path) -> Path | None:
    for folder in reversed(path.resolve().parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None
