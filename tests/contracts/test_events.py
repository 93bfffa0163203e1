"""Events: every version stays readable, and what is unknown is neither lost nor guessed."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dsec_contracts import BY_TYPE, Envelope, UnknownEvent, catalog, decode, encode, parse
from dsec_contracts.reward import REWARD_FIELDS
from dsec_contracts.step import STEP_FIELDS

CONTRACTS = Path(__file__).parents[2] / "contracts"
PATHS = sorted((CONTRACTS / "examples").glob("*/*/*.json"))
EXAMPLES = {f"{p.parent.parent.name}/{p.stem}": json.loads(p.read_text()) for p in PATHS}

every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())


def dump(value: Any) -> bytes:
    """JSON as events write it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def example(name: str) -> dict[str, Any]:
    return copy.deepcopy(EXAMPLES[name])


@every_example
def test_an_example_fits_its_frozen_schema(example: dict[str, Any]) -> None:
    path = CONTRACTS / "schemas" / f"{example['headers']['ce-type']}.schema.json"
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(example["body"])


@every_example
def test_an_examples_headers_fit_the_asyncapi_document(example: dict[str, Any]) -> None:
    document = json.loads((CONTRACTS / "asyncapi.json").read_text())
    message = document["components"]["messages"][example["headers"]["ce-type"]]
    root = {**document, "$ref": f"#/components/messages/{message['name']}/headers"}
    jsonschema.Draft202012Validator(root).validate(example["headers"])
    assert (CONTRACTS / message["payload"]["$ref"]).is_file()


@every_example
def test_an_example_round_trips(example: dict[str, Any]) -> None:
    envelope = Envelope.parse(example["headers"])
    assert envelope.headers() == example["headers"]
    event = parse(envelope.type, dump(example["body"]))
    body = event.body()
    assert _contains(json.loads(body), example["body"])
    assert parse(envelope.type, body) == event
    assert parse(envelope.type, body).body() == body


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return part.keys() <= whole.keys() and all(_contains(whole[k], part[k]) for k in part)
    return repr(whole) == repr(part)


@pytest.mark.parametrize("name", [n for n in EXAMPLES if not n.endswith("/smallest")])
def test_a_whole_example_is_written_byte_for_byte(name: str) -> None:
    # `smallest` leaves out what has a default; every other example says all.
    body = dump(EXAMPLES[name]["body"])
    assert parse(EXAMPLES[name]["headers"]["ce-type"], body).body() == body


@every_example
def test_unknown_fields_survive_byte_for_byte(example: dict[str, Any]) -> None:
    event_type = example["headers"]["ce-type"]
    unknown = {
        "a": [1, -0.0, 1e16, 5e-324, 2**80, None, True],
        "ä\0": {"z": 1, "y": {"": "\u2028"}},
    }
    body = json.loads(parse(event_type, dump(example["body"])).body())
    for part in (body, *(value for value in body.values() if isinstance(value, dict))):
        part["x_from_a_newer_version"] = unknown
    assert parse(event_type, dump(body)).body() == dump(body)


def test_unknown_fields_of_a_fact_are_part_of_it() -> None:
    changed = example("session.requested/unknown_fields")
    event = parse("session.requested.v1", dump(changed["body"]))
    assert event.fact_value()["budget_tokens"] == changed["body"]["fact"]["budget_tokens"]
    del changed["body"]["fact"]["budget_tokens"]
    other = parse("session.requested.v1", dump(changed["body"]))
    assert encode(event.fact_value()) != encode(other.fact_value())


def test_the_circumstance_is_no_part_of_the_fact() -> None:
    changed = example("session.placed/first")
    before = parse("session.placed.v1", dump(changed["body"])).fact_value()
    changed["body"]["circumstance"]["reason"] = "another"
    assert encode(parse("session.placed.v1", dump(changed["body"])).fact_value()) == encode(before)


def test_a_field_that_is_null_leaves_no_trace_in_the_fact() -> None:
    body = example("session.requested/smallest")["body"]
    fact = parse("session.requested.v1", dump(body)).fact_value()
    body["fact"]["fork_parent"] = None
    assert encode(parse("session.requested.v1", dump(body)).fact_value()) == encode(fact)


@every_example
def test_an_unknown_newer_version_is_unknown(example: dict[str, Any]) -> None:
    newer = re.sub(r"\d+$", "999", example["headers"]["ce-type"])
    with pytest.raises(UnknownEvent, match="999"):
        parse(newer, dump(example["body"]))


@pytest.mark.parametrize("event_type", ["", "session", "session.started", "ünknown.v1", "a" * 1000])
def test_what_is_no_type_is_unknown(event_type: str) -> None:
    with pytest.raises(UnknownEvent):
        parse(event_type, b"{}")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b"{", b"\xff", b"[" * 10**5, b'{"fact":' * 10**4]
)
@pytest.mark.parametrize("event_type", BY_TYPE)
def test_a_body_that_does_not_fit_is_a_validation_error(event_type: str, body: bytes) -> None:
    with pytest.raises(ValidationError):
        parse(event_type, body)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_body_is_refused_or_is_an_event(data: st.DataObject) -> None:
    chosen = EXAMPLES[data.draw(st.sampled_from(sorted(EXAMPLES)))]
    body = bytearray(dump(chosen["body"]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        event = parse(chosen["headers"]["ce-type"], bytes(body))
    except ValidationError:
        return
    assert parse(event.event_type(), event.body()).body() == event.body()


@pytest.mark.parametrize(
    ("name", "fields"), [("session.stepped", STEP_FIELDS), ("reward.scored", REWARD_FIELDS)]
)
def test_the_facts_of_example_rows_are_canonical_arrays(name: str, fields: tuple[str]) -> None:
    for path, value in EXAMPLES.items():
        if path.startswith(f"{name}/"):
            event: Any = parse(f"{name}.v1", dump(value["body"]))
            for fact in event.row.fact.unpack():
                assert len(decode(fact)) == len(fields)
                assert encode(decode(fact)) == fact


def test_a_spec_is_named_by_its_content() -> None:
    body = example("spec.registered/agent_with_code")["body"]
    body["fact"]["spec_hash"] = "0" * 64
    with pytest.raises(ValidationError, match="SHA-256"):
        parse("spec.registered.v1", dump(body))


@pytest.mark.parametrize("event_type", BY_TYPE)
def test_schemas_explain_themselves(event_type: str) -> None:
    schema = catalog.schema(BY_TYPE[event_type])
    assert schema["description"]
    assert all(part["description"] for part in schema["$defs"].values())


def test_upstream_systems_load_pydantic_and_nothing_else() -> None:
    code = (
        "import sys, dsec_contracts, dsec_contracts.freeze;"
        "print(*sorted({'numpy', 'torch', 'nats', 'yaml', 'dsec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.strip() == ""


def test_the_distribution_needs_pydantic_alone() -> None:
    project = tomllib.loads((CONTRACTS / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=]", name)[0] for name in project["dependencies"]] == ["pydantic"]
    for path in (CONTRACTS / "dsec_contracts").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            packages = {name.partition(".")[0] for name in names}
            assert packages <= {"pydantic", "dsec_contracts"} | sys.stdlib_module_names, path
