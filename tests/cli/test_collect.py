"""`dsec anchors collect` on a running stack: what nobody names goes, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import dsec
from dsec.client.collecting import Collected, collect
from dsec.client.endpoints import ClientError
from dsec.platform.objects import BlobNotFound, ObjectStore
from dsec_contracts import canonical

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

LONG_AGO = (1e9, 1e9)
WEIGHTS = {"w": np.arange(5.0)}


class RunningStack(Protocol):
    """See conftest.py."""

    state_dir: Path

    def dsec(self, *arguments: str, exit_code: int = 0) -> Any: ...
    def json(self, *arguments: str, exit_code: int = 0) -> Any: ...


async def _published(state_dir: Path) -> ObjectStore:
    async with dsec.Client(state_dir=state_dir) as client:
        await client.publish_policy("kept", WEIGHTS)
        return client.objects()


def test_blobs_that_nobody_names_are_collected(stack: RunningStack) -> None:
    store = asyncio.run(_published(stack.state_dir))
    policy = hashlib.sha256(canonical.encode(WEIGHTS)).hexdigest()
    old, young = store.put(b"an orphan"), store.put(b"a young orphan")
    folder = Path(store.place)
    draft = folder / old[:2] / "tmp0123abcd"
    draft.write_bytes(b"a draft")
    for path in (folder / old[:2] / old, folder / policy[:2] / policy, draft):
        os.utime(path, LONG_AGO)
    looked = stack.json("anchors", "collect", "--dry-run")
    assert (looked["orphans"], looked["left"], looked["removed"]) == (1, 1, 0)
    assert looked["named"] >= 1
    assert store.get(old)
    collected = stack.json("anchors", "collect")
    assert (collected["removed"], collected["removed_bytes"]) == (2, 16)
    assert store.get(policy)
    assert store.get(young)
    with pytest.raises(BlobNotFound):
        store.get(old)
    said = stack.dsec("anchors", "collect", "--older-than", "0.01", exit_code=2).stderr
    assert "older-than" in said
    assert "named nowhere" in stack.dsec("anchors", "collect").stdout


def test_a_store_of_which_the_log_names_nothing_is_left_alone(
    stack: RunningStack, tmp_path: Path
) -> None:
    store = ObjectStore(tmp_path.as_uri())
    key = store.put(b"somebody else's")
    os.utime(tmp_path / key[:2] / key, LONG_AGO)

    async def collected(**options: bool) -> Collected:
        async with dsec.Client(state_dir=stack.state_dir) as client:
            client.object_store_url = tmp_path.as_uri()
            return await collect(client, 2e9, **options)  # type: ignore[arg-type]

    with pytest.raises(ClientError, match="names none of the 1 blobs"):
        asyncio.run(collected())
    assert asyncio.run(collected(dry_run=True)).orphans == 1
    assert store.get(key)
    assert asyncio.run(collected(force=True)).removed == 1
