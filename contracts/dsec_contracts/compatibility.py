"""What may change in a published schema: an optional field may be added, nothing else.

Consumers of every age read one stream, and facts of every age are compared byte by byte. So a
change is judged from the frozen schema and the new one alone, strictly: whatever is not known to be
harmless asks for a new version of the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

DEPTH_MAX = 32
"""Schemas inside schemas; events do not refer to themselves."""

_WORDS_FOR_PEOPLE = frozenset({"title", "description", "examples", "$defs", "$schema", "$id"})
_ONE_SCHEMA = frozenset({"items", "additionalProperties", "propertyNames"})
_MANY_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_OWN_RULES = frozenset({"properties", "required", "default"})


def incompatibilities(old: Schema, new: Schema) -> list[str]:
    """Why `new` may not replace `old` under the same version; empty if it may."""
    return list(_compare(old, new, (old.get("$defs", {}), new.get("$defs", {})), "body", 0))


def _compare(
    old: Schema, new: Schema, defs: tuple[Schema, Schema], path: str, depth: int
) -> Iterator[str]:
    if depth > DEPTH_MAX:
        yield f"{path}: refers to itself"
        return
    old, new = _resolved(old, defs[0]), _resolved(new, defs[1])
    yield from _compare_properties(old, new, defs, path, depth)
    if not _default_kept(old, new):
        yield f"{path}: its default changed"
    for word in sorted((old.keys() | new.keys()) - _WORDS_FOR_PEOPLE - _OWN_RULES):
        a, b = old.get(word), new.get(word)
        if word in _ONE_SCHEMA and isinstance(a, dict) and isinstance(b, dict):
            yield from _compare(a, b, defs, f"{path}[]", depth + 1)
        elif word in _MANY_SCHEMAS and a and b and len(a) == len(b):
            for one, other in zip(a, b, strict=True):
                yield from _compare(one, other, defs, path, depth + 1)
        elif a != b:
            yield f"{path}: {word} changed from {a!r} to {b!r}"


def _compare_properties(
    old: Schema, new: Schema, defs: tuple[Schema, Schema], path: str, depth: int
) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    needed_before, needed_after = set(old.get("required", [])), set(new.get("required", []))
    for name in sorted(before):
        if name not in after:
            yield f"{path}.{name}: removed"
            continue
        if (name in needed_before) != (name in needed_after):
            yield f"{path}.{name}: required changed"
        yield from _compare(before[name], after[name], defs, f"{path}.{name}", depth + 1)
    for name in sorted(after.keys() - before.keys()):
        if name in needed_after:
            yield f"{path}.{name}: new and required"
        elif f"{path}.".startswith("body.fact.") and after[name].get("default", ...) is not None:
            # A fact leaves out what is null, so only then do older facts keep their bytes.
            yield f"{path}.{name}: a new field of a fact must default to null"


def _resolved(schema: Schema, defs: Schema) -> Schema:
    for _ in range(DEPTH_MAX):
        if "$ref" not in schema:
            break
        rest = {word: value for word, value in schema.items() if word != "$ref"}
        schema = {**defs.get(schema["$ref"].rpartition("/")[2], {}), **rest}
    return schema


def _default_kept(old: Schema, new: Schema) -> bool:
    a, b = old.get("default", ...), new.get("default", ...)
    if isinstance(a, dict) and isinstance(b, dict):
        # The default of a part lists all its fields, so it grows with them.
        return a.items() <= b.items()
    return bool(a == b) and type(a) is type(b)
