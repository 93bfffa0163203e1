"""A directory as an object store: one file a blob."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from dsec.platform.object_errors import ObjectStoreError

_NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK))


class Directory:
    """A directory. See `dsec.platform.objects.Backend`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return str(self._root)

    def write(self, name: str, data: bytes) -> None:
        """See `Backend`."""
        draft = self._draft(name, data)
        with _telling(name, "written"):
            os.replace(draft, self._root / name)

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """See `Backend`. Readers see the whole blob or none, and of several racers one wins."""
        path = self._root / name
        if path.exists():
            return False
        draft = self._draft(name, data)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise ObjectStoreError(f"{_short(name)} cannot be written: {error}") from error
            # A share without links: of two racers both would win, with the same bytes.
            with _telling(name, "written"):
                os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, name: str) -> bytes | None:
        """See `Backend`."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError as error:
            # A directory that is not mounted has no blobs either, but it comes back.
            if self._root.is_dir():
                return None
            raise ObjectStoreError(f"the object store {self._root} is not there") from error
        except OSError as error:
            raise ObjectStoreError(f"{_short(name)} cannot be read: {error}") from error

    def delete(self, name: str) -> None:
        """See `Backend`."""
        path = self._root / name
        with _telling(name, "deleted"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has others in it
            path.parent.rmdir()

    def _draft(self, name: str, data: bytes) -> Path:
        folder = (self._root / name).parent
        with _telling(name, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                draft = Path(file.name)
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    # On a full disk, each try would take what little is freed meanwhile.
                    draft.unlink(missing_ok=True)
                    raise
        return draft


@contextlib.contextmanager
def _telling(name: str, done: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except OSError as error:
        raise ObjectStoreError(f"{_short(name)} cannot be {done}: {error}") from error


def _short(name: str) -> str:
    return f"blob {Path(name).name[:12]}"
