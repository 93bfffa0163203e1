"""Running a function that asks services: with the responses known so far, from the start.

At the first request that has no response yet the run is abandoned (`Asks`); once there is one, the
function runs again. It depends on the transition and the responses alone, so up to there it asks
the same, and this is checked: a function that does not is not deterministic.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from dsec.reward.components import RewardError
from dsec.reward.services import Request, Response
from dsec.session.raised import told_in_a_line
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.reward import RESPONSE_FIELDS

CALLS_MAX: Final = 64
"""Requests of one function for one step."""


class Known(NamedTuple):
    """A response, and to what."""

    service: str
    method: str
    path: str
    request_hash: bytes
    ordinal: int
    status: int
    headers: dict[str, str]
    body: bytes


class Asks(RewardError):
    """The function wants responses that are not known yet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        super().__init__(
            "service_unanswered",
            f"{first.method} {first.path} of {first.service} has no recorded response",
        )
        self.requests = tuple(requests)


def request_hash(request: Request) -> bytes:
    """What tells apart two requests for one path: 16 bytes."""
    pairs = [list(pair) for pair in request.params]
    return hashlib.sha256(encode([pairs, request.body])).digest()[:16]


def recorded(responses: Sequence[Known]) -> bytes:
    """Responses as canonical bytes; empty where there is none."""
    return encode([list(one) for one in responses]) if responses else b""


def read_recorded(data: bytes) -> list[Known]:
    """What `recorded` was given.

    Raises:
        RewardError: `responses_malformed`.
    """
    if not data:
        return []
    try:
        rows = decode(data)
        if any(len(row) != len(RESPONSE_FIELDS) for row in rows):
            raise ValueError("a response has other fields")
        return [Known(*row) for row in rows]
    except (CanonicalError, TypeError, ValueError) as error:
        raise RewardError("responses_malformed", f"recorded responses: {error}") from error


def answered(
    requests: Sequence[Request], responses: Sequence[Response], before: Sequence[Known]
) -> list[Known]:
    """Responses with the names of their requests, behind those that were known `before`."""
    counts = Counter((one.service, one.method, one.path, one.request_hash) for one in before)
    known = list(before)
    for request, response in zip(requests, responses, strict=True):
        name = (request.service, request.method, request.path, request_hash(request))
        told = (response.status, dict(response.headers), response.body)
        known.append(Known(*name, counts[name], *told))
        counts[name] += 1
    return known


def run(coroutine: Any, known: Sequence[Known]) -> Any:
    """Run an `async def` that awaits nothing but services. Returns what it returns.

    Raises:
        Asks: it wants what is not known.
        RewardError: `reward_nondeterministic`, `reward_invalid`.
        BaseException: what the function raises.
    """
    position = 0
    counts: Counter[tuple[str, str, str, bytes]] = Counter()
    responses: list[Response] | None = None
    while True:
        try:
            asked = coroutine.send(responses)
        except StopIteration as finished:
            if position < len(known):
                raise _differs(known[position], None) from None
            return finished.value
        if not isinstance(asked, list) or not all(isinstance(one, Request) for one in asked):
            _abandon(coroutine)
            raise RewardError("reward_invalid", "the function awaited what is no call of a service")
        responses, unknown = [], []
        for request in asked:
            name = (request.service, request.method, request.path, request_hash(request))
            ordinal = counts[name]
            counts[name] += 1
            if position >= len(known):
                unknown.append(request)
                continue
            one = known[position]
            if (one[:4], one.ordinal) != (name, ordinal):
                _abandon(coroutine)
                raise _differs(one, request)
            position += 1
            responses.append(Response(one.status, one.headers, one.body))
        if sum(counts.values()) > CALLS_MAX:
            _abandon(coroutine)
            raise RewardError("reward_invalid", f"over {CALLS_MAX} calls of services for one step")
        if unknown:
            _abandon(coroutine)
            raise Asks(unknown)


def _abandon(coroutine: Any) -> None:
    """End a run that goes on later from the start. What the function does on its way out, in an
    `except:` or a `finally:`, is no outcome; only that it stays is."""
    try:
        coroutine.close()
    except BaseException as error:
        if inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED:
            told = f"the function cannot be abandoned: {told_in_a_line(error)}"
            raise RewardError("reward_invalid", told) from error


def _differs(one: Known, request: Request | None) -> RewardError:
    now = "nothing more" if request is None else f"{request.method} {request.path}"
    where = one.service if request is None else request.service
    return RewardError(
        "reward_nondeterministic",
        f"run again with the same responses, the function asks {where} for {now}, where it asked "
        f"{one.service} for {one.method} {one.path} before (or with other params): it must depend "
        "on the transition and the responses alone",
    )
