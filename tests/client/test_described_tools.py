"""Tools that their own servers describe: OpenAPI operations and MCP servers, read once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsec.client.sealing import SealedSpec
from dsec.client.specs import read_spec
from dsec.client.yaml_file import SpecFileError
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec_contracts import decode

API = """
openapi: 3.0.3
info: {title: shop, version: "1"}
servers: [{url: "http://{host}/v1", variables: {host: {default: 127.0.0.1:1}}}]
paths:
  /shops/{shop}/items:
    parameters:
      - {name: shop, in: path, required: true, schema: {type: string}}
      - {name: limit, in: query, schema: {type: integer, minimum: 0, exclusiveMinimum: true}}
    post:
      operationId: addItem
      summary: Adds an item.
      parameters:
        - {$ref: "#/components/parameters/Trace"}
        - {name: limit, in: query, description: how many, schema: {type: integer, nullable: true}}
      requestBody:
        required: true
        content: {application/json: {schema: {$ref: "#/components/schemas/Item"}}}
      responses: {}
    get:
      operationId: listItems
      responses: {}
  /login:
    get:
      operationId: login
      parameters: [{name: session, in: cookie, required: true, schema: {}}]
      responses: {}
    post:
      operationId: upload
      requestBody: {required: true, content: {multipart/form-data: {}}}
      responses: {}
    put:
      operationId: elsewhere
      requestBody: {content: {application/json: {schema: {$ref: "other.yaml#/x"}}}}
      responses: {}
    delete:
      operationId: later
      callbacks: {done: {"{$request.query.url}": {}}}
      responses: {}
components:
  parameters:
    Trace: {name: X-Trace, in: header, schema: {type: string}}
  schemas:
    Item:
      type: object
      required: [name]
      properties:
        name: {type: string}
        parts: {type: array, items: {$ref: "#/components/schemas/Item"}}
"""


class Echo(BaseHTTPRequestHandler):
    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        told = [self.command, self.path, self.headers.get("X-Trace"), body]
        data = API.encode() if self.path == "/api.yaml" else json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _do

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()


def tool_of(folder: Path, operation: str, **keys: Any) -> SealedSpec:
    (folder / "api.yaml").write_text(API)
    document = {"name": "x", "kind": "openapi", "document": "api.yaml", "operation": operation}
    (folder / "t.yaml").write_text(yaml.safe_dump(document | keys))
    return read_spec("tool", folder / "t.yaml")


def asked(spec: SealedSpec, arguments: Any) -> Outcome:
    tool = load(spec.spec_hash, spec.content, {})
    assert isinstance(tool, Tool), tool
    return tool.call(Order(json.dumps(arguments), "key"))


def test_the_spec_keeps_what_the_document_says_of_the_operation(tmp_path: Path) -> None:
    spec = tool_of(tmp_path, "addItem")
    document = spec.document
    assert (document.method, document.url) == ("POST", "http://127.0.0.1:1/v1/shops/{shop}/items")
    assert document.description == "Adds an item."
    assert document.places == {
        "shop": "path",
        "limit": "query",
        "X-Trace": "header",
        "body": "body",
    }
    schema = document.parameters
    assert schema["required"] == ["shop", "body"]
    assert schema["properties"]["limit"] == {
        "description": "how many",
        "type": ["integer", "null"],
    }
    assert schema["properties"]["body"] == {"$ref": "#/$defs/Item"}
    item = schema["$defs"]["Item"]["properties"]["parts"]["items"]
    assert item == {"$ref": "#/$defs/Item"}
    strict = tool_of(tmp_path, "listItems").document.parameters["properties"]["limit"]
    assert strict == {"type": "integer", "exclusiveMinimum": 0}
    (tmp_path / "api.yaml").unlink()
    assert spec.document.document == ""  # it is not needed again


def test_arguments_go_where_the_operation_has_them(tmp_path: Path, server: str) -> None:
    spec = tool_of(tmp_path, "addItem", url=f"{server}/v1")
    given = {"shop": "a/../b c", "limit": 3, "X-Trace": "t", "body": {"name": "lamp", "parts": []}}
    outcome = asked(spec, given)
    assert isinstance(outcome, bytes), outcome
    method, path, trace, body = decode(outcome)
    assert (method, trace) == ("POST", "t")
    assert path == "/v1/shops/a%2F..%2Fb%20c/items?limit=3"  # no other path
    assert json.loads(body) == given["body"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": {"name": "x"}},
        {"shop": "s", "body": {}},
        {"shop": "s", "body": {"name": "x", "parts": [{}]}},
        {"shop": "s", "body": {"name": "x"}, "other": 1},
    ],
)
def test_arguments_are_checked_by_the_documents_own_schemas(tmp_path: Path, arguments: Any) -> None:
    outcome = asked(tool_of(tmp_path, "addItem"), arguments)
    assert isinstance(outcome, Failure)
    assert outcome.code == "arguments_invalid"


def test_a_document_behind_a_url(tmp_path: Path, server: str) -> None:
    spec = tool_of(tmp_path, "listItems", document=f"{server}/api.yaml", url=server)
    assert spec.document.url == f"{server}/shops/{{shop}}/items"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"operation": "none"}, "has no operation none: it has listItems, addItem"),
        ({"operation": "login"}, "its parameter session goes into a cookie"),
        ({"operation": "upload"}, "its body is multipart/form-data, not JSON"),
        ({"operation": "elsewhere"}, "its schema refers to other.yaml"),
        ({"operation": "later"}, "it answers through a callback"),
        ({"document": "absent.yaml"}, "cannot be read"),
        ({"document": "t.yaml"}, "no OpenAPI 3 document"),
    ],
)
def test_operations_that_no_tool_can_be_made_of(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecFileError, match=r".*") as refused:
        tool_of(tmp_path, **{"operation": "addItem"} | keys)
    assert said in str(refused.value)


SERVER = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("s", log_level="ERROR")
@server.tool()
def add(x: int, y: int = 1) -> int:
    """Adds."""
    return x + y
server.run()
'''


def test_the_parameters_of_an_mcp_tool_are_its_servers(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    told = {"name": "add", "kind": "mcp", "command": sys.executable, "args": ["server.py"]}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(told | {"code": ["server.py"]}))
    spec = read_spec("tool", tmp_path / "t.yaml")
    assert spec.document.description == "Adds."
    assert spec.document.parameters["required"] == ["x"]
    assert set(spec.files) == {"server.py"}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(told | {"code": ["server.py"], "tool": "no"}))
    with pytest.raises(SpecFileError, match="has no tool no; it has add"):
        read_spec("tool", tmp_path / "t.yaml")


BROKEN_SERVER = """
import sys

print("a hint that is long ago" * 1000, file=sys.stderr)
import no_such_package
"""


def refusal(tmp_path: Path, server: str, **more: Any) -> str:
    """What is said of a tool whose server does not start."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(server)
    document = {"name": "lookup", "kind": "mcp", "command": sys.executable, "args": ["server.py"]}
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(document | {"code": ["server.py"]} | more))
    with pytest.raises(SpecFileError) as refused:
        read_spec("tool", tmp_path / "tool.yaml")
    return str(refused.value)


def test_of_a_server_that_does_not_start_the_last_word_is_told(tmp_path: Path) -> None:
    told = refusal(tmp_path, BROKEN_SERVER)
    assert "ModuleNotFoundError: No module named 'no_such_package': mend it, or write" in told
    assert "long ago" not in told
    assert "ExceptionGroup" not in told


def test_of_a_servers_last_word_its_secret_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_SECRET_SHOP_KEY", "s3cret-of-the-shop")
    server = "import os, sys; sys.exit('no such key: ' + os.environ['K'])"
    told = refusal(tmp_path, server, secrets=["SHOP_KEY"], env={"K": "${SHOP_KEY}"})
    assert "no such key: " in told
    assert "s3cret" not in told
