"""The published test vectors of the canonical encoding say what this implementation does.

`diagnose` is a second, independent reader of CBOR: it turns bytes into diagnostic notation (RFC
8949, section 8), so that a vector's bytes and its neutral description cannot drift apart.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsec_contracts.canonical import NESTING_DEPTH_MAX, CanonicalError, decode, encode

VECTORS = json.loads(
    (Path(__file__).parents[2] / "contracts/examples/canonical_vectors.json").read_text()
)


class Level(enum.IntEnum):
    HARD = 3


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


Point = namedtuple("Point", ["x", "y"])
GRID = np.arange(6, dtype="<i2").reshape(2, 3)

VALUES: dict[str, Any] = {
    "null": None,
    "false": False,
    "true": True,
    "zero": 0,
    "int 23": 23,
    "int 24": 24,
    "int 255": 255,
    "int 256": 256,
    "int 65535": 65535,
    "int 65536": 65536,
    "int 2^32-1": 2**32 - 1,
    "int 2^32": 2**32,
    "int 2^63-1": 2**63 - 1,
    "int 2^64-1": 2**64 - 1,
    "int 2^64, a bignum": 2**64,
    "int -1": -1,
    "int -24": -24,
    "int -25": -25,
    "int -2^63": -(2**63),
    "int -2^64": -(2**64),
    "int -2^64-1, a bignum": -(2**64) - 1,
    "int 10^40, a bignum": 10**40,
    "member of an integer enumeration": Level.HARD,
    "float 0.0": 0.0,
    "float -0.0": -0.0,
    "float 1.0, 64 bits all the same": 1.0,
    "float 1e16": 1e16,
    "float 0.1": 0.1,
    "float smallest subnormal": 5e-324,
    "float largest": 1.7976931348623157e308,
    "float infinity": float("inf"),
    "float -infinity": float("-inf"),
    "float NaN": float("nan"),
    "float NaN with another payload and sign": struct.unpack(
        ">d", bytes.fromhex("fff0000000000001")
    )[0],
    "empty text": "",
    "text": "größe",
    "text beyond the BMP": "\U0001f3b2",
    "text with NUL": "a\0b",
    "text, not normalised": "e\u0301",
    "text with a lone surrogate": "x\ud800",
    "text with two surrogates that are no character": "\ud83c\udfb2",
    "member of a text enumeration": Colour.RED,
    "empty bytes": b"",
    "bytes": bytes(range(25)),
    "bytearray": bytearray(b"\x00\xff"),
    "empty list": [],
    "list": [1, "a", None],
    "list of 24": list(range(24)),
    "empty map": {},
    "map in order of encoded keys": {"b": 1, "aa": 2, "a": 3, "": 4},
    "map with keys of many kinds": {
        True: 0,
        10: 1,
        -1: 2,
        "z": 3,
        b"z": 4,
        (1,): 5,
        1.5: 6,
        None: 7,
    },
    "nested": {"a": [{"b": [[], {}]}], "c": {"d": {"e": None}}},
    "empty tuple": (),
    "tuple": (1, [2, (3,)]),
    "named tuple": Point(1.5, [2]),
    "empty set": set(),
    "set": {3, 1, "a", 2},
    "frozen set in a set": {frozenset({1, 2}), 3},
    "array of float64": np.array([0.0, -0.0, 1.5, np.inf, -np.inf]),
    "array of float32": np.array([1, 2], "<f4"),
    "array of float16": np.array([1, 65504], "<f2"),
    "array of NaNs keeps their bits": np.array([0x7FC00001, 0xFFC00000], "<u4").view("<f4"),
    "array of bool": np.array([True, False]),
    "array of int8": np.array([-1, 127], "i1"),
    "array of uint8": np.array([[0, 255]], "u1"),
    "array of int64": np.array([-(2**63), 2**63 - 1], "<i8"),
    "array of uint64": np.array([2**64 - 1], "<u8"),
    "array of complex64": np.array([1 - 2j], "<c8"),
    "array of complex128": np.array([1 - 2j], "<c16"),
    "array of unicode": np.array(["ä", "abc"]),
    "array of byte strings": np.array([b"a", b"abc"]),
    "array of datetime64": np.array(["2026-03-02T09:30:00", "NaT"], "<M8[us]"),
    "array of datetime64 in steps of 25": np.array([1], "<M8[25s]"),
    "array of timedelta64": np.array([-1], "<m8[D]"),
    "array, big-endian": np.array([1, 2], ">f4"),
    "array of unicode, big-endian": np.array(["ab"], ">U2"),
    "array, C order": GRID,
    "array, Fortran order": np.asfortranarray(GRID),
    "array, transposed": GRID.T,
    "array, every second column": GRID[:, ::2],
    "array, reversed": GRID[::-1, ::-1],
    "array, broadcast": np.broadcast_to(np.array(7, "<i4"), (2, 2)),
    "array without dimensions": np.array(2.5),
    "array without items": np.zeros((0, 3), "<f4"),
    "numpy bool": np.bool_(True),
    "numpy int64": np.int64(-1),
    "numpy uint8": np.uint8(200),
    "numpy float32": np.float32(0.1),
    "numpy float64": np.float64(0.1),
    "numpy float64 -0.0": np.float64(-0.0),
    "numpy complex64": np.complex64(1 + 2j),
    "numpy text": np.str_("ab"),
    "numpy text, empty": np.str_(""),
    "numpy text with NUL at its end": np.str_("a\0"),
    "numpy bytes": np.bytes_(b"ab\0"),
    "numpy datetime64": np.datetime64("2026-03-02", "D"),
    "numpy timedelta64 without a unit": np.timedelta64(5),
    "torch tensor": torch.tensor([[1.0, 2.0]]),
    "torch tensor, not contiguous": torch.tensor([[1, 2], [3, 4]]).T,
    "observation": {"image": np.zeros((2, 2), "u1"), "legal": (np.int64(0), np.int64(3))},
}


def test_the_vectors_are_those_of_the_values() -> None:
    """Adding a vector is adding a value here and what this test prints to the file."""
    made = {name: (diagnose(encode(v)), encode(v).hex()) for name, v in VALUES.items()}
    published = {v["name"]: (v["diagnostic"], v["hex"]) for v in VECTORS["valid"]}
    assert made == published


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda v: v["name"])
def test_a_vector_decodes_to_a_value_of_the_same_bytes(vector: dict[str, str]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert encode(decode(data)) == data
    assert vector["value"]


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda v: v["name"])
def test_what_is_not_canonical_is_refused(vector: dict[str, str]) -> None:
    with pytest.raises(CanonicalError):
        decode(bytes.fromhex(vector["hex"]))


def test_the_depth_limit_is_published() -> None:
    assert VECTORS["nesting_depth_max"] == NESTING_DEPTH_MAX


def diagnose(data: bytes) -> str:
    text, end = _item(data, 0)
    assert end == len(data)
    return text


def _item(data: bytes, at: int) -> tuple[str, int]:
    major, low = data[at] >> 5, data[at] & 31
    at += 1
    if major == 7:
        if low == 27:
            value = struct.unpack_from(">d", data, at)[0]
            words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
            return words.get(repr(value), repr(value)), at + 8
        return {20: "false", 21: "true", 22: "null"}[low], at
    n = low
    if low >= 24:
        width = 1 << (low - 24)
        n, at = int.from_bytes(data[at : at + width], "big"), at + width
    if major < 2:
        return str(n if major == 0 else -1 - n), at
    if major == 2:
        return f"h'{data[at : at + n].hex()}'", at + n
    if major == 3:
        return json.dumps(data[at : at + n].decode()), at + n
    if major == 6:
        text, at = _item(data, at)
        return f"{n}({text})", at
    items = []
    for _ in range(n * (2 if major == 5 else 1)):
        text, at = _item(data, at)
        items.append(text)
    if major == 4:
        return f"[{', '.join(items)}]", at
    pairs = zip(items[::2], items[1::2], strict=True)
    return "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}", at
