"""The fact of a reward, as canonical bytes. Written by hand, since there is one a step."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Final

from dsec_contracts.canonical import encode, head

ENV: Final = "env"
"""The entry of the environment's own reward, and its one component."""

_pack_float = struct.Struct(">Bd").pack
_uint = lru_cache(maxsize=65_536)(lambda n: head(0, n))


def reward_fact(
    step: int, revision: int, value: float, components: Mapping[str, list[float]], cause: bytes
) -> bytes:
    """The canonical array of `REWARD_FIELDS`. `cause`: the first 16 bytes of the step's chain."""
    return facts_of_bodies([step], revision, [reward_body(value, components)], [cause])[0]


def facts_of_bodies(
    steps: Iterable[int], revision: int, bodies: Iterable[bytes], causes: Iterable[bytes]
) -> list[bytes]:
    """`reward_fact` of many rows, with value and components already encoded; no Python a row."""
    constant = repeat(b"\x85"), repeat(_uint(revision)), repeat(b"\x50")
    parts = zip(
        constant[0], map(_uint, steps), constant[1], bodies, constant[2], causes, strict=False
    )
    return list(map(b"".join, parts))


def reward_body(value: float, components: Mapping[str, list[float]]) -> bytes:
    """Value and components, canonical, one after the other."""
    start, order = _order(tuple(components))
    parts = [_float(value), start]
    for name, key in order:
        score, weight = components[name]
        parts += (key, _float(score), _float(weight))
    return b"".join(parts)


@lru_cache(maxsize=65_536)
def env_body(raw: bytes) -> bytes:
    """`reward_body` of the environment's own reward, from its 8 little-endian bytes.

    The bytes are the key of the cache: 0.0 and -0.0 are equal as numbers and must not be here.
    """
    value: float = struct.unpack("<d", raw)[0]
    return reward_body(value, {ENV: [value, 1.0]})


@lru_cache(maxsize=1024)
def _order(names: tuple[str, ...]) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """The head of a map of these names, and the names in canonical order with what precedes the
    two floats of each."""
    encoded = sorted((encode(name), name) for name in names)
    return head(5, len(names)), tuple((name, key + b"\x82") for key, name in encoded)


def _float(value: float) -> bytes:
    return _pack_float(0xFB, value) if value == value else encode(value)
