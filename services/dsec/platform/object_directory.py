"""A directory as an object store: one file a blob."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.platform.object_errors import ObjectStoreError
from dsec.platform.object_listing import REFRESH_AGE_S, Listed

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
            _sync(draft.parent)

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """See `Backend`. Readers see the whole blob or none, and of several racers one wins."""
        path = self._root / name
        if _is_there(path):
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
        with _telling(name, "written"):
            _sync(path.parent)
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

    def listed(self) -> Iterator[Listed]:
        """See `Backend`."""
        try:
            folders = [one for one in os.scandir(self._root) if one.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise ObjectStoreError(f"{self._root} cannot be listed: {error}") from error
        for folder in folders:
            # What goes away meanwhile was another collector's, or a draft.
            with contextlib.suppress(FileNotFoundError), _telling(folder.name, "listed"):
                for one in os.scandir(folder.path):
                    with contextlib.suppress(FileNotFoundError):
                        told = one.stat(follow_symlinks=False)
                        yield Listed(f"{folder.name}/{one.name}", told.st_size, told.st_mtime)

    def delete_if_older(self, name: str, before_s: float) -> bool:
        """See `Backend`. Moved aside first: whoever puts it meanwhile finds it gone and writes it
        anew, and one that was put again a moment before is moved back."""
        path = self._root / name
        with _telling(name, "deleted"):
            if not path.exists():
                return False
            descriptor, made = tempfile.mkstemp(dir=path.parent)
            os.close(descriptor)
            aside = Path(made)
            try:
                os.replace(path, aside)
            except FileNotFoundError:  # another collector was here
                aside.unlink()
                return False
            if aside.stat().st_mtime >= before_s:
                os.replace(aside, path)
                return False
            aside.unlink()
        return True

    def _draft(self, name: str, data: bytes) -> Path:
        folder = (self._root / name).parent
        with _telling(name, "written"):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                _sync(folder.parent)
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


def _sync(folder: Path) -> None:
    """A file's bytes outlive a power failure once it is synced, its name once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_there(path: Path) -> bool:
    """Whether a blob lies there; if so it is not old any more."""
    try:
        if time.time() - path.stat().st_mtime > REFRESH_AGE_S:
            os.utime(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ObjectStoreError(f"{_short(path.name)} cannot be read: {error}") from error
    return True


@contextlib.contextmanager
def _telling(name: str, done: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except OSError as error:
        raise ObjectStoreError(f"{_short(name)} cannot be {done}: {error}") from error


def _short(name: str) -> str:
    return f"blob {Path(name).name[:12]}"
