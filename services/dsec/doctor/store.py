"""The object store: proven by using it."""

from __future__ import annotations

from pathlib import Path

from dsec.doctor.finding import Finding, Unseen
from dsec.doctor.hiding import Hidden, shown
from dsec.platform.object_proof import ProofFailed, prove
from dsec.platform.objects import ObjectStoreError, backend_of
from dsec.platform.stack.state import StateDir


def object_store(url: str | None, state_dir: Path) -> Finding:
    """Write, conditional write, read and delete; in the stack's own store where none is given."""
    objects = StateDir(state_dir).objects_dir
    if url is None and objects.is_dir():
        url = objects.as_uri()
    if url is None:
        raise Unseen("No object store is given, and the stack has not made its own yet.")
    told, seen = shown(url), {"url": shown(url)}
    try:
        prove(backend_of(url))
    except ObjectStoreError as error:
        return Finding(
            "fail",
            f"{told}: {Hidden([url]).hide(str(error).replace(url, told))}.",
            "Set DSEC_OBJECT_STORE_URL to a directory (file:///…) or a bucket (s3://…).",
            seen,
        )
    except ProofFailed as error:
        reason = Hidden([url]).hide(error.reason)
        return Finding(
            "fail",
            f"{told} failed at its {error.step} ({reason}).",
            "Give this user the right to read, write and delete there, and use a store that "
            "keeps its promises.",
            {**seen, "step": error.step},
        )
    return Finding("ok", f"{told} writes, writes once, reads and deletes.", "", seen)
