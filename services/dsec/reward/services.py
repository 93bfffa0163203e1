"""The outside services that a reward function may ask: `await services["inventory"].get(...)`.

Nothing here asks anybody. A call is an awaitable that yields its request to whoever drives the
function (`reexecution.py`), and gets the recorded response of it. So a function that is scored
live, scored again or verified runs the same code, and no process of user code has a connection.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
PATH_CHARS_MAX: Final = 2048
PARAMS_MAX: Final = 256
REQUEST_BYTES_MAX: Final = 256 * 1024
"""The JSON body of one request."""


class NoServiceDeclared(LookupError):
    """A reward function asked for a service that its declaration does not name."""


class Request(NamedTuple):
    """What a service is asked. `params` are pairs of texts, `body` is JSON; None: no body."""

    service: str
    method: str
    path: str
    params: tuple[tuple[str, str], ...]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Response:
    """What a service answered, as it was recorded."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, in the character set that it names; UTF-8 where it names none."""
        told = Message()
        told["content-type"] = self.headers.get("content-type", "")
        try:
            return self.body.decode(str(told.get_param("charset") or "utf-8"), "replace")
        except LookupError:  # a character set that nobody knows
            return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: it is none.
        """
        return json.loads(self.body)


class Call:
    """One request, to be awaited once or more; each time it is asked anew."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __await__(self) -> Generator[list[Request], list[Response], Response]:
        (response,) = yield [self._request]
        return response


class Service:
    """One outside service. Paths are below its declared base URL."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self, path: str, *, params: Mapping[str, Any] | None = None) -> Call:
        """Ask by GET. The response's status may be any that the declaration does not retry."""
        return self.request("GET", path, params=params)

    def delete(self, path: str, *, params: Mapping[str, Any] | None = None) -> Call:
        """Ask by DELETE."""
        return self.request("DELETE", path, params=params)

    def post(self, path: str, *, json: Any = None, params: Mapping[str, Any] | None = None) -> Call:
        """Ask by POST, with a body of JSON."""
        return self.request("POST", path, json=json, params=params)

    def put(self, path: str, *, json: Any = None, params: Mapping[str, Any] | None = None) -> Call:
        """Ask by PUT, with a body of JSON."""
        return self.request("PUT", path, json=json, params=params)

    def patch(
        self, path: str, *, json: Any = None, params: Mapping[str, Any] | None = None
    ) -> Call:
        """Ask by PATCH, with a body of JSON."""
        return self.request("PATCH", path, json=json, params=params)

    def request(
        self, method: str, path: str, *, json: Any = None, params: Mapping[str, Any] | None = None
    ) -> Call:
        """Ask by any of `METHODS`.

        Raises:
            TypeError, ValueError: says which argument is wrong.
        """
        pairs = tuple(_pairs(params or {}))
        body = None if json is None else _body(json)
        request = Request(self._name, method, path, pairs, body)
        if (wrong := malformed(request)) is not None:
            raise ValueError(wrong)
        return Call(request)


class Services(Mapping[str, Service]):
    """The services that a reward function declared, by name."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._services = {name: Service(name) for name in names}

    def __getitem__(self, name: str) -> Service:
        found = self._services.get(name)
        if found is None:
            declared = ", ".join(sorted(self._services)) or "none"
            raise NoServiceDeclared(
                f"the function declares no service {name!r} (declared: {declared}): name it in "
                "@dsec.reward(services=[...])"
            )
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Refused like any look-up: a default would hide that the service is missing."""
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._services

    def __iter__(self) -> Iterator[str]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    def gather(self, *awaitables: Awaitable[Any]) -> Gathered:
        """Several calls, or coroutines that make some, asked at the same time.

        `await services.gather(a, b)` gives their results in order. There is no event loop here, so
        `asyncio.gather` is not for reward functions.
        """
        return Gathered(awaitables)


class Gathered:
    """Awaitables that advance together: in each round the requests of all are asked at once."""

    def __init__(self, awaitables: Sequence[Awaitable[Any]]) -> None:
        self._awaitables = awaitables

    def __await__(self) -> Generator[list[Request], list[Response], list[Any]]:
        results: list[Any] = [None] * len(self._awaitables)
        running = {n: one.__await__() for n, one in enumerate(self._awaitables)}
        answers: dict[int, Any] = dict.fromkeys(running)
        while running:
            asked: dict[int, list[Request]] = {}
            for n, generator in list(running.items()):
                try:
                    asked[n] = generator.send(answers[n])
                except StopIteration as finished:
                    results[n] = finished.value
                    del running[n]
            if asked:
                responses = yield [request for requests in asked.values() for request in requests]
                left = iter(responses)
                answers = {n: [next(left) for _ in requests] for n, requests in asked.items()}
        return results


def malformed(request: Request) -> str | None:
    """Why a request is none, or None. Also asked of what a process of user code says it wants."""
    method, path = request.method, request.path
    if method not in METHODS:
        return f"method {method!r:.40} is none of {', '.join(METHODS)}"
    if not path.startswith("/") or path.startswith("//") or len(path) > PATH_CHARS_MAX:
        return f"path {path!r:.200} must begin with one / and have {PATH_CHARS_MAX} characters"
    if any(c in path for c in "?#") or not path.isascii() or not path.isprintable():
        return f"path {path!r:.200} holds ?, # or what is not ASCII: params are for queries"
    if _leaves(path):
        return f"path {path!r:.200} holds .. or . or \\: it must stay below the base URL"
    if len(request.params) > PARAMS_MAX:
        return f"{len(request.params)} params; a request takes {PARAMS_MAX}"
    if request.body is not None and len(request.body) > REQUEST_BYTES_MAX:
        return f"a body of {len(request.body)} bytes; a request takes {REQUEST_BYTES_MAX}"
    try:
        for text in (text for pair in request.params for text in pair):
            text.encode()
        if request.body is not None:
            json.loads(request.body)
    except UnicodeEncodeError:
        return f"param {text!r:.80} holds half a character (a lone surrogate)"
    except (ValueError, RecursionError) as error:
        return f"the body is no JSON: {error}"
    return None


def _leaves(path: str) -> bool:
    """Whether a server might take a path for one that is not below the base URL: some decode it
    before they look, and some cut what follows a semicolon."""
    plain = unquote(path)
    return "\\" in plain or any(s.partition(";")[0] in (".", "..") for s in plain.split("/"))


def _pairs(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in params.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield str(name), _param(name, item)


def _param(name: str, value: Any) -> str:
    value = getattr(value, "item", lambda: value)()  # numpy's numbers as Python's
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise TypeError(f"param {name!r:.80} is no text or number but {type(value).__name__}")


def _body(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_of_numpy)
    return text.encode()


def _of_numpy(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
