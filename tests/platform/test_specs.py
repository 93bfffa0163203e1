"""What is absent is given up after a while; what is away is nobody's to give up."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.platform import specs
from dsec.platform.objects import ObjectStore, ObjectStoreError
from dsec.platform.specs import BlobMissing, Gone, Patience, SpecMissing, blob_content

ABSENT_S_MAX = 60.0
KEY = "0" * 64


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def look(patience: Patience, name: str = "x", error: Exception | None = None) -> None:
    """Look for a thing, and find this."""
    with patience.looking_for(name):
        if error is not None:
            raise error


def test_what_is_absent_is_gone_after_a_while_and_says_what_it_was() -> None:
    clock = Clock()
    patience = Patience(ABSENT_S_MAX, clock)
    for clock.now in (0.0, ABSENT_S_MAX - 1):
        with pytest.raises(SpecMissing):
            look(patience, error=SpecMissing("no"))
    clock.now = ABSENT_S_MAX
    with pytest.raises(Gone, match="no") as caught:
        look(patience, error=SpecMissing("no"))
    assert caught.value.code == "spec_not_found"
    with pytest.raises(BlobMissing):
        look(patience, "y", BlobMissing("its own time"))


def test_what_was_there_in_between_has_its_time_anew() -> None:
    clock = Clock()
    patience = Patience(ABSENT_S_MAX, clock)
    with pytest.raises(SpecMissing):
        look(patience, error=SpecMissing("no"))
    look(patience)
    clock.now = ABSENT_S_MAX
    with pytest.raises(SpecMissing):
        look(patience, error=SpecMissing("no"))


def test_what_is_away_is_never_gone() -> None:
    clock = Clock()
    patience = Patience(ABSENT_S_MAX, clock)
    for clock.now in (0.0, ABSENT_S_MAX, 100 * ABSENT_S_MAX):
        with pytest.raises(ObjectStoreError):
            look(patience, error=ObjectStoreError("away"))
    with pytest.raises(SpecMissing):
        look(patience, error=SpecMissing("absent only now"))


def test_what_has_been_looked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "NAMES_MAX", 2)
    clock = Clock()
    patience = Patience(ABSENT_S_MAX, clock)
    for name in "abc":
        with pytest.raises(SpecMissing):
            look(patience, name, SpecMissing("no"))
    clock.now = ABSENT_S_MAX
    with pytest.raises(SpecMissing):
        look(patience, "a", SpecMissing("the oldest was forgotten"))
    with pytest.raises(Gone):
        look(patience, "c", SpecMissing("no"))


def test_a_blob_that_is_there_and_one_that_is_not(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path.as_uri())
    assert blob_content(store, store.put(b"bytes"), "a thing") == b"bytes"
    with pytest.raises(BlobMissing, match="a thing: blob 000000000000 is not in"):
        blob_content(store, KEY, "a thing")
    with pytest.raises(BlobMissing, match="DSEC_OBJECT_STORE_URL"):
        blob_content(None, KEY, "a thing")
