"""`python -m dsec_contracts.freeze --check|--write`: published contracts stay what they were.

`--check` fails where the files of `contracts/` and the models have drifted apart. `--write` writes
what is missing and what changed compatibly; it refuses whatever needs a new version of an event.
Examples are written by people and only checked here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsec_contracts import asyncapi, catalog, upcasters
from dsec_contracts.compatibility import incompatibilities
from dsec_contracts.envelope import Envelope

SCHEMA_SUFFIX = ".schema.json"
ASYNCAPI_FILE = "asyncapi.json"
VECTORS_FILE = "canonical_vectors.json"

_WRITE = "run `python -m dsec_contracts.freeze --write`"
_NEW_VERSION = "needs a new version of the event"


def check(directory: Path) -> list[str]:
    """Every drift between the models and the files of `directory`, one sentence each."""
    return [
        *_check_schemas(directory),
        *_check_orphan_schemas(directory),
        *_check_examples(directory),
        *_check_asyncapi(directory),
    ]


def write(directory: Path) -> list[str]:
    """Bring schemas and AsyncAPI document up to the models.

    Returns:
        Why nothing was written; empty if all was.
    """
    refused = [
        f"{_schema_path(event_type)}: {reason}; {_NEW_VERSION}"
        for event_type, event in catalog.BY_TYPE.items()
        if (frozen := _load(directory / _schema_path(event_type))) is not None
        for reason in incompatibilities(frozen, catalog.schema(event))
    ]
    if refused:
        return refused
    for event_type, event in catalog.BY_TYPE.items():
        path = directory / _schema_path(event_type)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_dump(catalog.schema(event)), encoding="utf-8")
    (directory / ASYNCAPI_FILE).write_text(_dump(asyncapi.document()), encoding="utf-8")
    return []


def _known_types() -> set[str]:
    # A version that was superseded keeps its files: messages of it are still in the log.
    return catalog.BY_TYPE.keys() | upcasters.UPCASTERS.keys()


def _schema_path(event_type: str) -> str:
    return f"schemas/{event_type}{SCHEMA_SUFFIX}"


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}") from None


def _check_schemas(directory: Path) -> Iterator[str]:
    for event_type in sorted(_known_types()):
        path = directory / _schema_path(event_type)
        event = catalog.BY_TYPE.get(event_type)
        if not path.is_file():
            yield f"{_schema_path(event_type)}: missing; {_WRITE}"
        elif event is not None and path.read_text(encoding="utf-8") != _dump(catalog.schema(event)):
            reasons = incompatibilities(_load(path), catalog.schema(event))
            for reason in reasons:
                yield f"{_schema_path(event_type)}: {reason}; {_NEW_VERSION}"
            if not reasons:
                yield f"{_schema_path(event_type)}: changed compatibly; {_WRITE}"


def _check_orphan_schemas(directory: Path) -> Iterator[str]:
    expected = {_schema_path(event_type) for event_type in _known_types()}
    for path in sorted((directory / "schemas").rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in expected:
            yield f"{name}: no event has this schema"


def _check_examples(directory: Path) -> Iterator[str]:
    folders = {f"{name}/{version}": f"{name}.v{version}" for name, version in _versions()}
    root = directory / "examples"
    for folder, event_type in sorted(folders.items()):
        files = sorted((root / folder).glob("*.json"))
        if not files:
            yield f"examples/{folder}: {event_type} has no example"
        for path in files:
            problem = _example_problem(path, event_type)
            if problem:
                yield f"examples/{folder}/{path.name}: {problem}"
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        of_event = path.suffix == ".json" and path.parent.relative_to(root).as_posix() in folders
        if path.is_file() and not of_event and name != VECTORS_FILE:
            yield f"examples/{name}: no event has this example"


def _versions() -> Iterator[tuple[str, str]]:
    for event_type in _known_types():
        name, _, version = event_type.rpartition(".v")
        yield name, version


def _example_problem(path: Path, event_type: str) -> str | None:
    """Why an example is no message of its type, or None."""
    example = _load(path)
    if not isinstance(example, dict) or example.keys() != {"headers", "body"}:
        return "must hold `headers` and `body`"
    try:
        envelope = Envelope.parse(example["headers"])
        if envelope.type != event_type:
            return f"its ce-type is {envelope.type}, not {event_type}"
        catalog.parse(event_type, json.dumps(example["body"]).encode())
    except (ValueError, LookupError) as error:  # pydantic's and the envelope's are ValueErrors
        return str(error)
    return None


def _check_asyncapi(directory: Path) -> Iterator[str]:
    path = directory / ASYNCAPI_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != _dump(asyncapi.document()):
        yield f"{ASYNCAPI_FILE}: differs from the catalogue; {_WRITE}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exits 1 where the answer is no."""
    parser = argparse.ArgumentParser(prog="python -m dsec_contracts.freeze", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail on any drift")
    action.add_argument("--write", action="store_true", help="write compatible changes")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="the contracts directory (default: the one that this package is in)",
    )
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    if not directory.is_dir() or (options.check and not (directory / "schemas").is_dir()):
        parser.error(f"{directory} has no contracts in it; name them with --directory")
    problems = write(directory) if options.write else check(directory)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
