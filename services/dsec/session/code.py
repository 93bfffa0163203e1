"""Loading the code that a spec ships, so that a spec's hash pins what runs.

Two specs may each ship a ``helper.py``, and both must live in one process. So every shipped file is
a module under a name of its own, ``dsec_code_<first 16 of the hash>.<module>``, imported by the
ordinary machinery: ``sys.modules``, circular imports, pickle, dataclasses, ``typing``, tracebacks
and ``inspect.getsource`` all work as for any module. What makes ``import helper`` find the right
one is an ``__import__`` in the shipped modules' own builtins, which looks at the shipped files
first and also records what else the code imports. Neither files nor directories are read.

A module runs once per process, whichever session comes first, so its body runs under a `Chance`
that depends on the code alone; and importing an installed library from within a session runs
outside that session, or the first session in a process would see other draws than the second.

What DSec uses itself in the same process (``hashlib``, ``json``, …) shipped code gets as copies, or
a function that one session replaces would break all others. That is for slips: who replaces parts
of numpy, which works with its own public names, breaks the sessions beside it.

Not covered: ``importlib.import_module("helper")`` in shipped code knows only installed names.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Final

from dsec.session import chance, virtual_datetime
from dsec.session.code_errors import CodeError, telling
from dsec.session.seeds import derive

NAMES_TOLD_MAX = 8

_PREFIX: Final = "dsec_code_"
_HASH: Final = re.compile(r"[0-9a-f]{16,}")
_OWN: Final = frozenset(("base64", "copy", "hashlib", "json", "struct", "traceback", "zlib"))
"""What DSec and its libraries use at every step: shipped code gets copies. Modules that people
replace parts of so that other libraries see it, such as numpy, are not among them."""


class CodeNamespace:
    """The shipped code of one spec, importable.

    ``files`` maps relative posix paths to sources. A second namespace of the same hash shares the
    first one's modules; the same hash with other files is refused. ``imported`` names, at top
    level, what the shipped code has imported that it does not ship; lazy imports add to it later.
    """

    imported: set[str]

    def __init__(self, spec_hash: str, files: Mapping[str, bytes]) -> None:
        if not _HASH.fullmatch(spec_hash):
            raise CodeError("bad_entry", "spec_hash", f"not a hexadecimal hash: {spec_hash!r}")
        name = _PREFIX + spec_hash[:16]
        shipped = _SHIPPED.get(name)
        if shipped is None:
            shipped = _Shipped(name, spec_hash, files)
            _SHIPPED[name] = shipped
            if _FINDER not in sys.meta_path:
                sys.meta_path.insert(0, _FINDER)
        elif shipped.spec_hash != spec_hash or shipped.files != dict(files):
            raise CodeError("bad_entry", "code", f"other code is already loaded as {name}")
        self.name = name
        self.imported = shipped.imported
        self._shipped = shipped

    def load(self, entry: str) -> Any:
        """The object that ``agent.py:MyAgent`` (shipped) or ``package.module:Class`` names.

        Raises `CodeError`, whatever the code does, ``sys.exit`` and ``KeyboardInterrupt`` included.
        """
        place, colon, attribute = entry.partition(":")
        if not colon or not all(part.isidentifier() for part in attribute.split(".")):
            raise CodeError(
                "bad_entry", "entry", f"expected FILE.py:NAME or MODULE:NAME: {entry!r}"
            )
        if place.endswith(".py") or "/" in place:
            found = self._load_file(place)
        else:
            found = self._load_installed(place)
        with telling("entry", self.name):
            for part in attribute.split("."):
                try:
                    found = getattr(found, part)
                except AttributeError:
                    raise CodeError(
                        "attribute_not_found",
                        "entry",
                        f"{place} has no {attribute!r}{_what_it_has(found)}",
                    ) from None
        return found

    def unload(self) -> None:
        """Forget the modules. For when no session uses the spec any more."""
        _SHIPPED.pop(self.name, None)
        _forget([name for name in list(sys.modules) if _belongs(name, self.name)])

    def _load_file(self, path: str) -> Any:
        module = _module_name(path, "entry")
        if path not in self._shipped.files:
            raise CodeError("module_not_found", "entry", f"{path} is not among the shipped files")
        with telling("entry", self.name):
            return self._shipped.import_module(module)

    def _load_installed(self, module: str) -> Any:
        if not all(part.isidentifier() for part in module.split(".")):
            raise CodeError("bad_entry", "entry", f"not a module name: {module!r}")
        with telling("entry", None), _outside_session():
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError as error:
                # Only the entry itself is not found; what it fails to import is its own fault.
                if error.name is None or not _belongs(module, error.name):
                    raise
                raise CodeError("module_not_found", "entry", str(error)) from None
        self.imported.add(module.partition(".")[0])
        return found


class _Shipped(InspectLoader):
    """The files under one name: resolves, compiles and runs them."""

    def __init__(self, name: str, spec_hash: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.spec_hash = spec_hash
        self.files = dict(files)
        self.imported: set[str] = set()
        self.copies: dict[str, types.ModuleType] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}
        self.paths: dict[str, str | None] = {"": None}  # module -> file; None: a bare package
        self.packages = {""}
        for path in self.files:
            self._index(path)
        both = sorted(
            self.packages.intersection(
                _module_name(p, "code") for p in self.files if not p.endswith("__init__.py")
            )
        )
        if both:
            raise CodeError("bad_entry", "code", f"both a module and a package: {both[0]}")

    def _index(self, path: str) -> None:
        module = _module_name(path, "code")
        self.paths[module] = path
        parents = module.split(".")
        if not path.endswith("__init__.py"):
            parents.pop()
        for depth in range(1, len(parents) + 1):
            package = ".".join(parents[:depth])
            self.packages.add(package)
            self.paths.setdefault(package, None)

    # -- the import machinery's side: full names in, modules out

    def find(self, fullname: str) -> ModuleSpec | None:
        module = fullname[len(self.name) + 1 :]
        if module not in self.paths:
            return None
        path = self.paths[module]
        is_package = module in self.packages
        origin = None if path is None else f"{self.name}/{path}"
        spec = ModuleSpec(fullname, self, origin=origin, is_package=is_package)
        spec.has_location = path is not None
        return spec

    def is_package(self, fullname: str) -> bool:
        return fullname[len(self.name) + 1 :] in self.packages

    def get_source(self, fullname: str) -> str:
        path = self.paths[fullname[len(self.name) + 1 :]]
        return "" if path is None else importlib.util.decode_source(self.files[path])

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__[len(self.name) + 1 :]
        path = self.paths[name]
        if path is None:
            return
        source = compile(self.files[path], f"{self.name}/{path}", "exec", dont_inherit=True)
        vars(module)["__builtins__"] = self.builtins
        seed = derive(int(self.spec_hash, 16), f"module:{name}", 0)
        with _under(chance.Chance(seed)):
            exec(source, vars(module))

    # -- the shipped code's side: the names it writes in, the modules it expects out

    def import_module(self, module: str) -> types.ModuleType:
        """The shipped module of that name; a failure leaves no module that it began."""
        fullname = f"{self.name}.{module}" if module else self.name
        loaded = sys.modules.get(fullname)
        if loaded is not None:  # perhaps half-way, as in any circular import
            return loaded
        before = {name for name in list(sys.modules) if _belongs(name, self.name)}
        try:
            return importlib.import_module(fullname)
        except BaseException:
            now = [name for name in list(sys.modules) if _belongs(name, self.name)]
            _forget([name for name in now if name not in before and name != self.name])
            raise

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        if level > 0:
            absolute = self._absolute(name, globals or {}, level)
            return self._with_submodules(absolute, fromlist or ())
        top = name.partition(".")[0]
        if top in self.paths:
            self.import_module(name)
            return self._with_submodules(name if fromlist else top, fromlist or ())
        if name == "datetime":
            self.imported.add(name)
            return virtual_datetime.module
        with _outside_session():
            found = builtins.__import__(name, globals, locals, fromlist or (), level)
        self.imported.add(top)
        return self._own(found) if found.__name__ in _OWN else found

    def _own(self, module: types.ModuleType) -> types.ModuleType:
        """This code's own copy of a module: what it replaces in there is replaced for it alone."""
        copied = self.copies.get(module.__name__)
        if copied is None:
            copied = self.copies[module.__name__] = types.ModuleType(module.__name__)
            vars(copied).update(vars(module))
        return copied

    def _absolute(self, name: str, importer: Mapping[str, Any], level: int) -> str:
        package = str(importer.get("__package__") or "")[len(self.name) + 1 :]
        if not package:
            raise ImportError("attempted relative import with no known parent package")
        parts = package.split(".")
        if level > len(parts):
            raise ImportError("attempted relative import beyond top-level package")
        return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])

    def _with_submodules(self, module: str, fromlist: Sequence[str]) -> types.ModuleType:
        found = self.import_module(module)
        names = [getattr(found, "__all__", ()) if name == "*" else (name,) for name in fromlist]
        for name in (name for group in names for name in group):
            submodule = f"{module}.{name}"
            if submodule in self.paths and not hasattr(found, name):
                self.import_module(submodule)
        return found


class _Finder(MetaPathFinder):
    """Finds shipped modules by full name, so that unpickling also imports what was lazy."""

    def find_spec(
        self, fullname: str, path: Any = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        shipped = _SHIPPED.get(fullname.partition(".")[0])
        return None if shipped is None else shipped.find(fullname)


_SHIPPED: Final[dict[str, _Shipped]] = {}
_FINDER: Final = _Finder()


def _module_name(path: str, field: str) -> str:
    """``pkg/sub.py`` -> ``pkg.sub``; anything but a plain relative path to a .py is refused."""
    stem = path.removesuffix(".py")
    parts = stem.split("/")
    # A leading underscore and hyphens are let through: `01_agent.py` is a fine entry. Dots, empty
    # parts, backslashes, drive letters and NUL are no identifiers, so nothing can leave the root.
    if stem == path or not all(("_" + p.replace("-", "_")).isidentifier() and p for p in parts):
        raise CodeError("bad_entry", field, f"not a relative path to a .py file: {path!r}")
    if parts == ["__init__"]:
        raise CodeError("bad_entry", field, "the shipped files are no package: __init__.py")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _what_it_has(module: Any) -> str:
    """The classes and functions that a file makes: one of them is what a wrong name meant."""
    if type(module) is not types.ModuleType:
        return ""
    kinds = (type, types.FunctionType)
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, kinds) and value.__module__ == module.__name__ and name[0] != "_"
    ]
    return f"; it has {', '.join(own[:NAMES_TOLD_MAX])}" if own else ""


def _belongs(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _forget(names: Sequence[str]) -> None:
    for name in names:
        parent, _, child = name.rpartition(".")
        module = sys.modules.pop(name, None)
        if module is not None and vars(sys.modules.get(parent, module)).get(child) is module:
            delattr(sys.modules[parent], child)


@contextmanager
def _under(temporary: chance.Chance | None) -> Iterator[None]:
    held = chance.current()
    chance.slot.chance = temporary
    try:
        yield
    finally:
        chance.slot.chance = held


def _outside_session() -> Any:
    return _under(None)
