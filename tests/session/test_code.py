"""Shipped code: pinned by its hash, isolated by its name, ordinary to Python's own tools."""

import dataclasses
import hashlib
import inspect
import pickle
import subprocess
import sys
import traceback
import typing

import pytest

from dsec.session import chance
from dsec.session.code import CodeError, CodeNamespace


@pytest.fixture
def ship():
    made = []

    def build(**sources):
        files = {name.replace("__", "/") + ".py": text.encode() for name, text in sources.items()}
        return of(files)

    def of(files):
        spec_hash = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
        made.append(CodeNamespace(spec_hash, files))
        return made[-1]

    build.of = of
    yield build
    chance.deactivate()
    for one in made:
        one.unload()


def modules_of(namespace):
    return sorted(n for n in sys.modules if n.startswith(namespace.name + "."))


def failure(call) -> CodeError:
    with pytest.raises(CodeError) as caught:
        call()
    return caught.value


def test_two_versions_of_a_helper_side_by_side(ship):
    agent = "import helper\nclass A:\n    def v(self):\n        return helper.V\n"
    one = ship(agent=agent, helper="V = 1")
    two = ship(agent=agent, helper="V = 2")
    first, second = one.load("agent.py:A"), two.load("agent.py:A")
    assert (first().v(), second().v()) == (1, 2)
    assert "helper" not in sys.modules


def test_the_same_hash_gives_the_same_objects(ship):
    one = ship(agent="class A: pass")
    two = ship(agent="class A: pass")
    assert one.load("agent.py:A") is two.load("agent.py:A")


def test_other_files_under_a_loaded_hash_are_refused(ship):
    one = ship(agent="A = 1")
    full = one._shipped.spec_hash
    assert failure(lambda: CodeNamespace(full, {"agent.py": b"A = 2"})).code == "bad_entry"
    assert failure(lambda: CodeNamespace(full[:16] + "0" * 48, {"agent.py": b"A = 1"})).field == (
        "code"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import pkg.sub as found",
        "from pkg import sub as found",
        "import pkg.sub; found = pkg.sub",
        "from pkg.sub import me as found",
        "from pkg.deep.leaf import up as found",
        "from pkg.deep.leaf import side as found; found = found.up",
        "from pkg import *; found = sub",
        "import bare.one; found = bare.one.found",
    ],
)
def test_packages_and_relative_imports(ship, line):
    namespace = ship.of(
        {
            "agent.py": line.encode(),
            "pkg/__init__.py": b"__all__ = ['sub']",
            "pkg/sub.py": b"import sys; me = sys.modules[__name__]",
            "pkg/deep/__init__.py": b"",
            "pkg/deep/leaf.py": b"from .. import sub as up\nfrom . import other as side",
            "pkg/deep/other.py": b"from ..sub import me as up",
            "bare/one.py": b"from pkg import sub as found",
        }
    )
    assert namespace.load("agent.py:found").__name__ == namespace.name + ".pkg.sub"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from . import x", "no known parent package"),
        ("import pkg.far", "beyond top-level package"),
        ("import pkg.missing", "No module named"),
        ("from pkg import missing", "cannot import name"),
    ],
)
def test_imports_fail_as_in_python(ship, line, message):
    namespace = ship(agent=line, pkg__near="", pkg__far="from ... import x")
    error = failure(lambda: namespace.load("agent.py:A"))
    assert error.code == "import_failed"
    assert message in error.message


def test_circular_imports(ship):
    namespace = ship(
        a="import b\nclass A:\n    other = staticmethod(lambda: b.B)\n",
        b="import a\nclass B:\n    other = staticmethod(lambda: a.A)\n",
    )
    found = namespace.load("a.py:A")
    assert found.other().other() is found


def test_lazy_imports_are_shipped_and_recorded(ship):
    namespace = ship(
        agent="import json\ndef run():\n    import random, helper\n    return helper.V\n",
        helper="import os.path as p\nV = 5",
    )
    run = namespace.load("agent.py:run")
    assert namespace.imported == {"json"}
    assert run() == 5
    assert namespace.imported == {"json", "random", "os"}


def test_a_failed_import_leaves_nothing(ship):
    namespace = ship(agent="import helper, broken", helper="import agent", broken="1/0")
    assert failure(lambda: namespace.load("agent.py:A")).code == "import_failed"
    assert modules_of(namespace) == []
    assert not hasattr(sys.modules[namespace.name], "helper")


def test_a_failed_lazy_import_leaves_what_was_there(ship):
    namespace = ship(
        agent="import good\ndef run():\n    import broken\n",
        good="",
        broken="import x1\n1/0",
        x1="",
    )
    run = namespace.load("agent.py:run")
    before = modules_of(namespace)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run()
    assert modules_of(namespace) == before


@pytest.mark.parametrize(
    "source",
    [
        "def (",
        "\0",
        "1/0",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise StopIteration",
        "import sys; sys.exit()",
        "import nonexistent_module_of_no_one",
        "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E",
        "def f(): f()\nf()",
        "def __getattr__(name): raise KeyboardInterrupt",
    ],
)
def test_whatever_code_does_at_import_is_a_code_error(ship, source):
    error = failure(lambda: ship(agent=source).load("agent.py:A"))
    assert (error.code, error.field) == ("import_failed", "entry")
    assert len(error.message) < 17_000


def test_an_endless_message_is_cut(ship):
    error = failure(lambda: ship(agent="raise ValueError('x' * 10**6)").load("agent.py:A"))
    assert len(error.message) < 17_000


def test_the_traceback_tells_of_user_code_only(ship):
    namespace = ship(
        agent="import helper", helper="import json\n\njson.loads('{')  # the user's line\n"
    )
    message = failure(lambda: namespace.load("agent.py:A")).message
    assert "json.loads('{')  # the user's line" in message
    assert f'File "{namespace.name}/helper.py", line 3' in message
    assert "importlib" not in message
    assert "decoder.py" not in message
    assert "code.py" not in message


def test_the_traceback_of_chained_errors_is_cut_too(ship):
    source = (
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    raise KeyError from e"
    )
    message = failure(lambda: ship(agent=source).load("agent.py:A")).message
    assert "JSONDecodeError" in message
    assert "decoder.py" not in message


def test_syntax_errors_show_the_line(ship):
    message = failure(lambda: ship(agent="x = 1\ny = = 2\n").load("agent.py:A")).message
    assert "y = = 2" in message
    assert "line 2" in message


def test_later_tracebacks_show_the_source(ship):
    run = ship(agent="def run():\n    return 1 / 0  # here\n").load("agent.py:run")
    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(caught.value))


def test_python_tools_take_it_for_a_module(ship):
    source = (
        "from __future__ import annotations\nimport dataclasses\n\n\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n    other: Point | None = None\n"
    )
    point = ship(agent=source).load("agent.py:Point")
    assert typing.get_type_hints(point)["other"] == typing.Optional[point]  # noqa: UP045
    assert inspect.getsource(point).endswith("other: Point | None = None\n")
    assert dataclasses.asdict(point(1)) == {"x": 1, "other": None}
    assert pickle.loads(pickle.dumps(point(3))) == point(3)


def test_unpickling_imports_what_was_lazy(ship):
    namespace = ship(
        agent="def make():\n    import state\n    return state.S()\n", state="class S: v = 7"
    )
    data = pickle.dumps(namespace.load("agent.py:make")())
    namespace.unload()
    CodeNamespace(namespace._shipped.spec_hash, namespace._shipped.files)
    assert pickle.loads(data).v == 7


def test_exec_and_nested_functions_keep_the_importer(ship):
    namespace = ship(
        agent="d = {}\nexec('import helper\\nV = helper.V', d)\nV = d['V']", helper="V=9"
    )
    assert namespace.load("agent.py:V") == 9


@pytest.mark.parametrize(
    "path",
    [
        "../agent.py",
        "/agent.py",
        "a/../agent.py",
        "./agent.py",
        "a//b.py",
        "a\\b.py",
        "C:agent.py",
        "agent.txt",
        "agent",
        "",
        ".py",
        "a.b.py",
        "agent.py\0",
        "a\0.py",
        "~/x y.py",
        "__init__.py",
    ],
)
def test_hostile_names_are_refused(ship, path):
    assert failure(lambda: ship.of({path: b""})).code == "bad_entry"
    assert failure(lambda: ship(agent="A=1").load(f"{path}:A")).code in {
        "bad_entry",
        "module_not_found",
    }


@pytest.mark.parametrize("path", ["../agent.py", "/agent.py", "a/../agent.py", "a\\b.py", "a/b"])
def test_hostile_entries_are_refused(ship, path):
    error = failure(lambda: ship(agent="A=1").load(f"{path}:A"))
    assert (error.code, error.field) == ("bad_entry", "entry")


@pytest.mark.parametrize(
    "entry", ["agent.py", "agent.py:", "agent.py:a-b", ":A", "agent.py:A.", ""]
)
def test_entries_without_a_name_are_refused(ship, entry):
    assert failure(lambda: ship(agent="A=1").load(entry)).code == "bad_entry"


@pytest.mark.parametrize("bad", ["", "abc", "Z" * 16, "sha256:" + "0" * 64, "0" * 16 + "/../x"])
def test_what_is_no_hash_is_refused(bad):
    assert failure(lambda: CodeNamespace(bad, {})).field == "spec_hash"


def test_a_module_and_a_package_of_one_name_are_refused(ship):
    assert failure(lambda: ship(a="", a__b="")).code == "bad_entry"


def test_what_is_not_there(ship):
    namespace = ship(agent="A = 1")
    assert failure(lambda: namespace.load("other.py:A")).code == "module_not_found"
    assert failure(lambda: namespace.load("agent.py:B")).code == "attribute_not_found"
    assert failure(lambda: namespace.load("no_such_pkg.mod:B")).code == "module_not_found"
    assert failure(lambda: namespace.load("json.no_such:B")).code == "module_not_found"
    assert failure(lambda: namespace.load("json:B")).code == "attribute_not_found"


def test_a_name_that_is_not_there_is_told_with_those_that_are(ship):
    namespace = ship(agent="import json\nclass MyAgent: ...\ndef made(): ...\ndef _own(): ...")
    assert "has no 'Agent'; it has MyAgent, made" in str(
        failure(lambda: namespace.load("agent.py:Agent"))
    )
    assert "has no 'A'; it has" not in str(failure(lambda: ship(b="C = 1").load("b.py:A")))


def test_hyphens_digits_and_nested_attributes(ship):
    namespace = ship.of({"01-agent.py": b"class A:\n    class B: v = 1"})
    assert namespace.load("01-agent.py:A.B").v == 1


def test_installed_entries(ship):
    namespace = ship()
    assert namespace.load("collections.abc:Mapping") is typing.get_origin(typing.Mapping)
    assert namespace.imported == {"collections"}


def test_shipped_names_win_over_installed_ones_for_shipped_code_only(ship):
    namespace = ship(agent="import json\nV = json.V", json="V = 3")
    assert namespace.load("agent.py:V") == 3
    import json

    assert json.loads("1") == 1


def test_datetime_is_virtual_in_shipped_code(ship):
    source = (
        "import datetime as dt\nfrom datetime import datetime\n"
        "def run():\n    import datetime as d\n"
        "    return [d.datetime.now().year, dt.date.today().year, datetime.utcnow().year]\n"
    )
    namespace = ship(agent=source)
    run = namespace.load("agent.py:run")
    chance.activate(chance.Chance(1))
    assert run() == [2020, 2020, 2020]
    assert namespace.imported == {"datetime"}


def test_imports_within_a_session_neither_see_nor_disturb_it(ship, tmp_path, monkeypatch):
    (tmp_path / "installed_thing.py").write_text(
        "from dsec.session import chance\nseen = chance.current()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = ship(
        agent="def run():\n    import installed_thing, helper\n"
        "    return installed_thing.seen, helper.drawn\n",
        helper="from dsec.session import chance\ndrawn = chance.current().random.random()\n",
    )
    run = namespace.load("agent.py:run")
    active = chance.Chance(1)
    chance.activate(active)
    seen, drawn = run()
    assert seen is None
    assert chance.current() is active
    assert active.used == set()
    namespace.unload()
    again = CodeNamespace(namespace._shipped.spec_hash, namespace._shipped.files)
    assert again.load("helper.py:drawn") == drawn
    sys.modules.pop("installed_thing")


def test_the_package_reads_no_clock_entropy_or_files():
    """What `dsec.session`'s loading modules import by themselves, in a fresh process."""
    script = (
        "import ast, pathlib, dsec.session.code as c\n"
        "folder = pathlib.Path(c.__file__).parent\n"
        "names = ['seeds', 'chance', 'code', 'code_errors', 'virtual_datetime']\n"
        "trees = [ast.parse((folder / f'{n}.py').read_text()) for n in names]\n"
        "found = {a.name for t in trees for n in ast.walk(t) if isinstance(n, ast.Import) "
        "for a in n.names}\n"
        "print(sorted(found & {'time', 'os', 'secrets', 'uuid', 'io', 'pathlib', 'socket'}))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_what_code_replaces_in_a_module_that_dsec_uses_is_replaced_for_it_alone(ship):
    broken = """
import copy, hashlib, json, struct, traceback, zlib, base64
from json import loads

def broken(*args, **kwargs):
    raise RuntimeError("broken")

copy.deepcopy = hashlib.sha256 = hashlib.blake2b = json.loads = json.dumps = broken
struct.pack = struct.unpack = traceback.format_exception = zlib.crc32 = base64.b64encode = broken

def mine():
    import json
    return json.loads is broken and struct.pack is broken and loads("[1]") == [1]
"""
    assert ship(agent=broken).load("agent.py:mine")()
    assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
    other = "import json, struct\ndef good(): return json.loads('1'), struct.pack('<b', 1)\n"
    assert ship(agent=other).load("agent.py:good")() == (1, b"\x01")
    plain = "import json.decoder, xml.dom\nimport numpy, sys\nfound = json.decoder, numpy, sys\n"
    decoder, numpy, system = ship(agent=plain).load("agent.py:found")
    assert decoder is sys.modules["json.decoder"]
    assert (numpy, system) == (sys.modules["numpy"], sys), "patched so that others see it"
