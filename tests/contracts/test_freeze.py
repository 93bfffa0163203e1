"""The freeze check finds every kind of drift, and nothing incompatible is written over."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec_contracts import freeze
from dsec_contracts.compatibility import incompatibilities

CONTRACTS = Path(__file__).parents[2] / "contracts"
SCHEMA = "schemas/session.requested.v1.schema.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("schemas", "examples"):
        shutil.copytree(CONTRACTS / name, tmp_path / name)
    shutil.copy(CONTRACTS / "asyncapi.json", tmp_path)
    return tmp_path


def change(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_the_repository_has_not_drifted() -> None:
    assert freeze.check(CONTRACTS) == []


def test_writing_twice_changes_nothing(directory: Path) -> None:
    assert freeze.write(directory) == []
    before = {p: p.read_bytes() for p in directory.rglob("*.json")}
    assert freeze.write(directory) == []
    assert {p: p.read_bytes() for p in directory.rglob("*.json")} == before
    assert freeze.check(directory) == []


def test_a_missing_schema_is_found_and_written(directory: Path) -> None:
    (directory / SCHEMA).unlink()
    assert [p for p in freeze.check(directory) if "missing" in p]
    assert freeze.write(directory) == []
    assert freeze.check(directory) == []


def test_an_optional_field_is_added_by_writing(directory: Path) -> None:
    # A frozen schema that lacks what the model has is one from before the field was added.
    change(directory / SCHEMA, lambda s: s["$defs"]["RequestFact"]["properties"].pop("policy"))
    change(directory / SCHEMA, lambda s: s["$defs"]["RequestCircumstance"].update(properties={}))
    change(directory / SCHEMA, lambda s: s["properties"]["circumstance"].update(default={}))
    assert freeze.check(directory) == [
        f"{SCHEMA}: changed compatibly; run `python -m dsec_contracts.freeze --write`"
    ]
    assert freeze.write(directory) == []
    assert freeze.check(directory) == []


def test_other_words_are_no_change_of_the_contract(directory: Path) -> None:
    change(directory / SCHEMA, lambda s: s.update(description="in other words"))
    assert "changed compatibly" in freeze.check(directory)[0]
    assert freeze.write(directory) == []


def fact(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda schema: edit(schema["$defs"]["RequestFact"])


INCOMPATIBLE: dict[str, tuple[Callable[[Any], None], str]] = {
    "removed": (fact(lambda f: f["properties"].update(gone={"type": "string"})), "gone: removed"),
    "retyped": (fact(lambda f: f["properties"]["seed"].update(type="string")), "seed: type"),
    "narrowed": (fact(lambda f: f["properties"]["seed"].update(maximum=2**70)), "seed: maximum"),
    "retyped option": (
        fact(lambda f: f["properties"]["policy"]["anyOf"][0].update(type="integer")),
        "policy: type",
    ),
    "fewer options": (fact(lambda f: f["properties"]["policy"]["anyOf"].pop()), "policy: anyOf"),
    "retyped values of a map": (
        fact(lambda f: f["properties"]["labels"]["additionalProperties"].update(type="number")),
        r"labels\[\]: type",
    ),
    "new and required": (
        fact(lambda f: (f["properties"].pop("seed"), f["required"].remove("seed"))),
        "seed: new and required",
    ),
    "now required": (fact(lambda f: f["required"].remove("seed")), "seed: required changed"),
    "no longer required": (fact(lambda f: f["required"].append("policy")), "policy: required"),
    "another default": (fact(lambda f: f["properties"]["priority"].update(default=1)), "default"),
    "a new field of the fact that is not null": (
        fact(lambda f: f["properties"].pop("agent_stream")),
        "agent_stream: a new field of a fact must default to null",
    ),
}


@pytest.mark.parametrize(("edit", "says"), INCOMPATIBLE.values(), ids=INCOMPATIBLE.keys())
def test_an_incompatible_change_is_found_and_never_written(
    directory: Path, edit: Callable[[Any], None], says: str
) -> None:
    change(directory / SCHEMA, edit)
    frozen = (directory / SCHEMA).read_text()
    other = directory / "schemas/session.ended.v1.schema.json"
    other.unlink()
    for problems in (freeze.check(directory), freeze.write(directory)):
        text = "\n".join(problems)
        assert "needs a new version" in text
        assert re.search(says, text), text
    assert (directory / SCHEMA).read_text() == frozen
    assert not other.exists()  # all or nothing


def test_widening_a_list_of_words_needs_a_version_too() -> None:
    def schema(words: list[str]) -> dict[str, Any]:
        return {"properties": {"code": {"enum": words, "type": "string"}}}

    assert incompatibilities(schema(["a"]), schema(["a", "b"])) == [
        "body.code: enum changed from ['a'] to ['a', 'b']"
    ]


def test_a_schema_that_refers_to_itself_is_refused() -> None:
    part = {"properties": {"next": {"$ref": "#/$defs/Part"}}}
    schema = {"$ref": "#/$defs/Part", "$defs": {"Part": part}}
    assert "refers to itself" in incompatibilities(schema, schema)[0]


ORPHANS = [
    "schemas/session.invented.v1.schema.json",
    "schemas/session.started.v2.schema.json",
    "examples/session.invented/1/a.json",
    "examples/session.started/2/a.json",
    "examples/session.started/1/notes.txt",
    "examples/stray.json",
]


@pytest.mark.parametrize("name", ORPHANS)
def test_an_orphan_is_found(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text("{}")
    problems = freeze.check(directory)
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: no event has this")


def test_a_missing_example_is_found(directory: Path) -> None:
    shutil.rmtree(directory / "examples/session.started")
    assert freeze.check(directory) == [
        "examples/session.started/1: session.started.v1 has no example"
    ]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda e: e["body"]["fact"].pop("session_id"), "session_id"),
        (lambda e: e["headers"].pop("ce-id"), "ce-id is missing"),
        (lambda e: e["headers"].update({"ce-type": "session.ended.v1"}), "its ce-type is"),
        (lambda e: e.pop("headers"), "must hold"),
    ],
)
def test_an_example_that_is_no_message_is_found(
    directory: Path, edit: Callable[[Any], None], says: str
) -> None:
    change(directory / "examples/session.started/1/cartpole.json", edit)
    problems = freeze.check(directory)
    assert len(problems) == 1
    assert says in problems[0]


def test_a_drifted_asyncapi_document_is_found_and_written(directory: Path) -> None:
    change(directory / "asyncapi.json", lambda d: d["channels"].pop("session.started"))
    assert freeze.check(directory)[0].startswith("asyncapi.json: differs")
    assert freeze.write(directory) == []
    assert freeze.check(directory) == []


def test_the_command_answers_by_its_exit_code(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsec_contracts.freeze", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--check").returncode == 0  # finds the directory of its own source
    (directory / SCHEMA).unlink()
    failed = run("--check", "--directory", str(directory))
    assert failed.returncode == 1
    assert SCHEMA in failed.stdout
    # What it answers from here on needs no process of its own.
    assert freeze.main(["--write", "--directory", str(directory)]) == 0
    assert freeze.main(["--check", "--directory", str(directory)]) == 0
    with pytest.raises(SystemExit) as nowhere:
        freeze.main(["--check", "--directory", str(directory / "nowhere")])
    assert nowhere.value.code == 2
    assert "--directory" in capsys.readouterr().err
