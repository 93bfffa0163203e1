"""PostgreSQL's programs: where they are, how they are started, and what they see.

They come from a pip package or out of a private root, and the launcher need not know which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec.platform.stack.unprivileged import Unprivileged


@dataclass(frozen=True)
class Programs:
    """One PostgreSQL. `folder` holds its programs, as they are seen from inside `root`.

    Where `root` is given the programs see that folder as `/`: by what `runner` puts before their
    command line, or, with `changes_root`, because they are started so.
    """

    folder: Path
    runner: Unprivileged
    env: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None
    changes_root: bool = False

    def argv(self, program: str, *arguments: str) -> tuple[str, ...]:
        """The command line of one program."""
        return self.runner.argv(str(self.folder / program), *arguments)

    def seen(self, path: Path) -> str:
        """How the programs name one of our files."""
        return str(path) if self.root is None else f"/{path.relative_to(self.root)}"
