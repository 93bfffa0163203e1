"""An operation of an OpenAPI document (3.0, 3.1) as a tool: what it takes, and where that goes.

The document is read once, when the tool is registered; the spec keeps the operation, so that a hash
pins what is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin

import aiohttp
import yaml

from dsec.client.yaml_file import SpecFileError
from dsec.platform.http_client import open_session
from dsec.session.tool_document import Place, ToolDocument

DOCUMENT_BYTES_MAX = 16 << 20
FETCH_S_MAX = 30.0
REFS_DEEP_MAX = 64
BODY = "body"
"""The argument that is the request's body."""
_METHODS = ("get", "post", "put", "patch", "delete")
_PLACES: dict[str, Place] = {"path": "path", "query": "query", "header": "header"}
_COMPONENTS = "#/components/schemas/"


def with_operation(document: ToolDocument, folder: Path, where: str) -> ToolDocument:
    """A tool document with all that its OpenAPI document says of the operation.

    Raises:
        SpecFileError: the document cannot be read, has no such operation, or one that no tool can
            be made of.
    """
    where = f"{where}: document {document.document}"
    try:
        return _Operation(_read(document.document, folder, where), document, where).tool()
    except (AttributeError, KeyError, TypeError) as error:
        raise SpecFileError(
            f"{where}: no OpenAPI document as there should be: {error!r}"
        ) from error


def _read(named: str, folder: Path, where: str) -> Mapping[str, Any]:
    try:
        if named.startswith(("http://", "https://")):
            # In a thread: whoever registers a tool may be in a loop of their own.
            with ThreadPoolExecutor(1) as threads:
                content = threads.submit(asyncio.run, _fetched(named)).result()
        else:
            content = (folder / named).read_bytes()
    except (OSError, aiohttp.ClientError, ValueError) as error:
        raise SpecFileError(f"{where}: it cannot be read: {error or repr(error)}") from error
    if len(content) > DOCUMENT_BYTES_MAX:
        raise SpecFileError(f"{where}: it has over {DOCUMENT_BYTES_MAX} bytes")
    try:
        value = yaml.safe_load(content)  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SpecFileError(f"{where}: neither YAML nor JSON: {error}") from error
    if not isinstance(value, dict) or not str(value.get("openapi", "")).startswith("3."):
        raise SpecFileError(f"{where}: no OpenAPI 3 document: its `openapi` must say 3.x")
    return value


async def _fetched(url: str) -> bytes:
    """What a server has, up to one byte more than a document may have."""
    async with (
        asyncio.timeout(FETCH_S_MAX),
        open_session(kept=False, proxies=True) as session,
        session.get(url, raise_for_status=True) as answer,
    ):
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > DOCUMENT_BYTES_MAX:
                break
        return bytes(content)


class _Operation:
    """One operation of a document."""

    def __init__(self, whole: Mapping[str, Any], document: ToolDocument, where: str) -> None:
        self._whole = whole
        self._document = document
        self._where = where
        self._schemas: dict[str, Any] = {}
        """Those that the parameters refer to, by name."""

    def tool(self) -> ToolDocument:
        """See `with_operation`."""
        path, method, shared, operation = self._found()
        if operation.get("callbacks") and not self._document.accepted_is_result:
            self._refuse(
                "it answers through a callback, which nobody hears; name an operation that waits, "
                "or, if what it answers at once is the result, `accepted_is_result: true`"
            )
        places: dict[str, Place] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter in self._parameters(shared, operation):
            name, place = parameter["name"], _PLACES.get(parameter["in"])
            if place is None:
                if parameter.get("required"):
                    self._refuse(f"its parameter {name} goes into a {parameter['in']}")
                continue
            if name in places:
                self._refuse(f"it has two parameters called {name}")
            places[name] = place
            properties[name] = self._schema(parameter.get("schema", {}))
            if text := parameter.get("description"):
                properties[name] = {"description": text, **properties[name]}
            if parameter.get("required") or place == "path":
                required.append(name)
        self._take_body(operation, places, properties, required)
        schema = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
        if self._schemas:
            schema["$defs"] = self._schemas
        given = self._document.model_fields_set
        told = operation.get("description") or operation.get("summary") or ""
        return self._document.model_copy(
            update={
                "document": "",
                "url": self._server().rstrip("/") + path,
                "method": method.upper(),
                "places": places,
                "parameters": self._document.parameters if "parameters" in given else schema,
                "description": self._document.description or told,
            }
        )

    def _found(self) -> tuple[str, str, Mapping[str, Any], Mapping[str, Any]]:
        known = []
        for path, given in self._whole.get("paths", {}).items():
            item = self._resolved(given)
            for method in _METHODS:
                operation = item.get(method)
                if operation is None or "operationId" not in operation:
                    continue
                if operation["operationId"] == self._document.operation:
                    return path, method, item, operation
                known.append(operation["operationId"])
        some = ", ".join(known[:20]) or "none that has an operationId"
        raise SpecFileError(
            f"{self._where}: it has no operation {self._document.operation}: it has {some}"
        )

    def _server(self) -> str:
        if self._document.url:
            return self._document.url
        servers = self._whole.get("servers") or [{"url": "/"}]
        url: str = servers[0]["url"]
        for name, variable in servers[0].get("variables", {}).items():
            url = url.replace("{" + name + "}", str(variable["default"]))
        url = urljoin(self._document.document, url)
        if not url.startswith(("http://", "https://")):
            raise SpecFileError(f"{self._where}: it does not say where its server is: give `url`")
        return url

    def _parameters(
        self, shared: Mapping[str, Any], operation: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """An operation's own stand in the place of those of its path."""
        found: dict[tuple[str, str], Mapping[str, Any]] = {}
        for given in [*shared.get("parameters", []), *operation.get("parameters", [])]:
            parameter = self._resolved(given)
            found[parameter["name"], parameter["in"]] = parameter
        return iter(found.values())

    def _take_body(
        self,
        operation: Mapping[str, Any],
        places: dict[str, Place],
        properties: dict[str, Any],
        required: list[str],
    ) -> None:
        if "requestBody" not in operation:
            return
        body = self._resolved(operation["requestBody"])
        kinds = body.get("content", {})
        kind = next((k for k in kinds if k.partition(";")[0].strip() == "application/json"), None)
        if kind is None:
            if body.get("required"):
                self._refuse(f"its body is {', '.join(kinds) or 'of no kind'}, not JSON")
            return
        if BODY in places:
            self._refuse(f"it has a parameter called {BODY} beside its body")
        places[BODY] = "body"
        properties[BODY] = self._schema(kinds[kind].get("schema", {}))
        if body.get("required"):
            required.append(BODY)

    def _resolved(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(REFS_DEEP_MAX):
            if "$ref" not in value:
                break
            value = self._at(value["$ref"])
        else:
            self._refuse("its references go in circles")
        return value

    def _at(self, ref: str) -> Any:
        if not ref.startswith("#/"):
            self._refuse(f"it refers to another document, {ref}")
        found: Any = self._whole
        for part in ref[2:].split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found

    def _schema(self, value: Any, deep: int = 0) -> Any:
        """A schema as JSON Schema (2020-12) has it, which OpenAPI 3.0 does not quite."""
        if deep > REFS_DEEP_MAX:
            self._refuse(f"its schemas are nested more than {REFS_DEEP_MAX} deep")
        if isinstance(value, list):
            return [self._schema(one, deep + 1) for one in value]
        if not isinstance(value, dict):
            return value
        told = {
            name: self._schema(one, deep + 1)
            for name, one in value.items()
            if name not in ("nullable", "example", "discriminator", "xml", "externalDocs")
        }
        if isinstance(ref := told.get("$ref"), str):
            told["$ref"] = self._referred(ref, deep)
        for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(told.get(strict), bool) and told.pop(strict):
                told[strict] = told.pop(bound)
        if value.get("nullable") is True and isinstance(told.get("type"), str):
            told["type"] = [told["type"], "null"]
        return told

    def _referred(self, ref: str, deep: int) -> str:
        if not ref.startswith(_COMPONENTS):
            self._refuse(f"its schema refers to {ref}, not to one of {_COMPONENTS}")
        name = ref.removeprefix(_COMPONENTS)
        if name not in self._schemas:
            self._schemas[name] = True  # it may refer to itself
            self._schemas[name] = self._schema(self._at(ref), deep + 1)
        return f"#/$defs/{name}"

    def _refuse(self, why: str) -> NoReturn:
        raise SpecFileError(f"{self._where}: operation {self._document.operation}: {why}")
