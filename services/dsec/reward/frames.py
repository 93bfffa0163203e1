"""What the service and its scoring process say to each other: canonical bytes with a length before.

Not pickle: user code lives in the scoring process, and what it writes must not run in the service.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsec.reward.services import Request, malformed
from dsec_contracts.canonical import decode, encode
from dsec_contracts.columns import VarColumn

FRAME_BYTES_MAX = 1 << 30
READY = b"ready"


class Task(NamedTuple):
    """One row to be scored by a function. `spec` is the hash of its spec."""

    spec: str
    fact: bytes
    observation: bytes
    next_observation: bytes
    responses: bytes = b""
    """What services have answered for this row so far: canonical rows of `RESPONSE_FIELDS`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no reward. `fatal`: the function is at fault, and its session cannot go on."""

    code: str
    message: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Needs:
    """A row's function wants these responses, and then to be run again."""

    requests: tuple[Request, ...]


Outcome = bytes | Failure | Needs
"""A row's encoded value and components, or why it has none (yet)."""


def request(tasks: Sequence[Task], send: Mapping[str, bytes], drop: Sequence[str]) -> bytes:
    """Rows to score, specs that are new to the process, and specs it should forget."""
    specs = list(dict.fromkeys(task.spec for task in tasks))
    place = {spec: n for n, spec in enumerate(specs)}
    columns = [
        VarColumn.pack(column)
        for column in (
            [task.fact for task in tasks],
            [task.observation for task in tasks],
            [task.next_observation for task in tasks],
            [task.responses for task in tasks],
        )
    ]
    return encode(
        [
            list(drop),
            dict(send),
            specs,
            struct.pack(f"<{len(tasks)}I", *[place[task.spec] for task in tasks]),
            [[column.offsets, column.data] for column in columns],
        ]
    )


def read_request(body: bytes) -> tuple[list[str], dict[str, bytes], list[Task]]:
    """What `request` was given: specs to forget, new specs, rows."""
    drop, new, specs, places, columns = decode(body)
    facts, before, after, responses = (
        VarColumn.model_construct(offsets=offsets, data=data).unpack() for offsets, data in columns
    )
    which = struct.unpack(f"<{len(places) // 4}I", places)
    tasks = list(map(Task, [specs[n] for n in which], facts, before, after, responses))
    return drop, new, tasks


def reply(outcomes: Sequence[Outcome], changed: Mapping[str, list[str]] | None = None) -> bytes:
    """The outcome of every row, in order; and by spec, what changed while they were scored."""
    failures = [
        [n, outcome.code, outcome.message]
        for n, outcome in enumerate(outcomes)
        if isinstance(outcome, Failure)
    ]
    needs = [
        [
            n,
            [
                [*request[:3], [list(pair) for pair in request.params], request.body]
                for request in outcome.requests
            ],
        ]
        for n, outcome in enumerate(outcomes)
        if isinstance(outcome, Needs)
    ]
    column = VarColumn.pack([o if isinstance(o, bytes) else b"" for o in outcomes])
    return encode([column.offsets, column.data, failures, needs, dict(changed or {})])


def read_reply(body: bytes, rows: int) -> list[Outcome]:
    """What `reply` was given.

    Raises:
        ValueError: the bytes are no reply to that many rows.
    """
    try:
        offsets, data, failures, needs, _ = decode(body)
        outcomes: list[Outcome] = list(VarColumn(offsets=offsets, data=data).unpack())
        for n, code, message in failures:
            outcomes[n] = Failure(str(code), str(message))
        for n, requests in needs:
            outcomes[n] = Needs(tuple(map(_request, requests)))
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no reply: {error}") from error
    if len(outcomes) != rows:
        raise ValueError(f"{len(outcomes)} outcomes for {rows} rows")
    return outcomes


def read_changed(body: bytes) -> dict[str, list[str]]:
    """By spec, what changed while rows were scored; of a body that `read_reply` has taken."""
    changed = decode(body)[4]
    if not isinstance(changed, dict):
        return {}
    return {str(spec): [str(name) for name in names] for spec, names in changed.items()}


def _request(fields: list[Any]) -> Request:
    """A request as user code's process wrote it.

    Raises:
        ValueError, TypeError, AttributeError: it is none.
    """
    service, method, path, pairs, body = fields
    texts = (service, method, path, *(text for pair in pairs for text in pair))
    if not all(isinstance(text, str) for text in texts) or not isinstance(
        body, (bytes, type(None))
    ):
        raise ValueError("a request has other fields")
    request = Request(service, method, path, tuple((name, value) for name, value in pairs), body)
    if (wrong := malformed(request)) is not None:
        raise ValueError(wrong)
    return request
