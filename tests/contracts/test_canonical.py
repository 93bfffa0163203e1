"""The canonical encoding: one value, one sequence of bytes; and no bytes do harm."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsec_contracts.canonical import NESTING_DEPTH_MAX, CanonicalError, decode, encode, head

TAG = b"\xd8\x1b"
Point = namedtuple("Point", ["x", "y"])

texts = st.text(st.characters(exclude_categories=())) | st.text()
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary()
# Two NaNs are two keys to Python and one to the encoding, so keys have none.
hashable = st.recursive(
    plain.filter(lambda value: value == value),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | hnp.unicode_string_dtypes(endianness="?")
    | hnp.byte_string_dtypes()
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
arrays = hnp.arrays(dtypes, shapes)
values = st.recursive(
    plain | arrays | hnp.from_dtype(np.dtype("f4")) | st.sets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_decodes_to_the_same_bytes(value: Any) -> None:
    data = encode(value)
    assert encode(decode(data)) == data


@given(st.recursive(plain, lambda i: st.lists(i) | st.tuples(i) | st.dictionaries(texts, i)))
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back_equal(value: Any) -> None:
    assert repr(_sorted(decode(encode(value)))) == repr(_sorted(value))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((k, _sorted(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_sorted, value))
    return value


@given(arrays)
@settings(max_examples=150, deadline=None)
def test_an_array_comes_back_writable_with_its_items(array: np.ndarray) -> None:
    back = decode(encode(array))
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.flags.writeable
    assert back.tobytes() == array.astype(back.dtype).tobytes()


@given(arrays)
@settings(max_examples=100, deadline=None)
def test_strides_order_and_byte_order_leave_no_trace(array: np.ndarray) -> None:
    expected = encode(array)
    assert encode(np.asfortranarray(array).reshape(array.shape)) == expected
    assert encode(array.astype(array.dtype.newbyteorder(">"))) == expected
    assert encode(np.repeat(array[..., None], 2, -1)[..., 0]) == expected


@given(st.dictionaries(hashable, plain, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_insertion_leaves_no_trace(value: dict[Any, Any], rng: random.Random) -> None:
    items = list(value.items())
    rng.shuffle(items)
    assert encode(dict(items)) == encode(value) == encode(OrderedDict(items))


@given(st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_are_canonical(data: bytes) -> None:
    _decode_safely(data)


def test_damaged_bytes_are_refused_or_are_canonical() -> None:
    rng = random.Random(20)
    seeds = [encode(value) for value in SEEDS]
    names = [
        b"\x65tuple",
        b"\x62nd",
        b"\x62np",
        b"\x65named",
        b"\x63set",
        b"\x65torch",
        b"\x64wtf8",
    ]
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            how = rng.randrange(7)
            if how == 0 and at < len(data):
                data[at] = rng.randrange(256)
            elif how == 1:
                data[at:at] = rng.choice(seeds)
            elif how == 2:
                del data[at : at + rng.randint(1, 4)]
            elif how == 3:
                length = rng.choice([2**63, 2**64 - 1, 2**31, 2**40])
                data[at:at] = head(rng.randrange(7), length)
            elif how == 4:
                data[at:at] = TAG + bytes([0x80 + rng.randint(0, 5)])
            elif how == 5:
                data[at:at] = rng.choice(names)
            else:
                data[at:at] = data[at : at + 8]
        _decode_safely(bytes(data))


SEEDS: list[Any] = [
    [None, True, 1, -1, 2**70, -(2**70), 1.5, float("nan"), "aé", "\ud800x", b"12"],
    {"a": 1, "b": [1], "c": {1: 2, 1.5: 3, (1, 2): 4}},
    {frozenset({1, 2}): {1, 2, "a"}},
    Point(1, np.zeros(2)),
    namedtuple("Renamed", ["a", "class"], rename=True)(1, 2),
    np.zeros((2, 3), "f4"),
    np.array(["ab", "c"]),
    np.array([1], "M8[ns]"),
    np.zeros((0, 3)),
    [np.float16(1), np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.bool_(True)],
    np.datetime64("2020-01-01", "us"),
    torch.zeros(2, 3),
]


def _decode_safely(data: bytes) -> None:
    try:
        value = decode(data)
    except CanonicalError:
        return
    assert encode(value) == data


def text(value: str) -> bytes:
    return head(3, len(value.encode())) + value.encode()


def array(dtype: str, shape: bytes, raw: bytes) -> bytes:
    return TAG + b"\x84\x62nd" + text(dtype) + shape + head(2, len(raw)) + raw


HOSTILE = {
    "lists in lists": b"\x81" * 1_000_000,
    "maps in maps": b"\xa1\x00" * 500_000,
    "tags in tags": b"\xc2" * 1_000_000,
    "tuples in tuples": (TAG + b"\x82\x65tuple") * 100_000,
    "tensors in tensors": (TAG + b"\x82\x65torch") * 100_000,
    "2^64 bytes": b"\x5b" + b"\xff" * 8,
    "2^64 items": b"\x9b" + b"\xff" * 8,
    "2^64 pairs": b"\xbb" + b"\xff" * 8,
    "2^64 members": TAG + b"\x9b" + b"\xff" * 8 + b"\x63set",
    "2^64 fields": TAG + b"\x84\x65named\x61P\x9b" + b"\xff" * 8,
    "a number as an object's name": TAG + b"\x81\xc2" + head(2, 100_000) + b"\xff" * 100_000,
    "a negative dimension": array("<f4", b"\x81\x20", b""),
    "dimensions that overflow": array("<f4", b"\x82" + head(0, 2**62) + b"\x04", b""),
    "a dimension that numpy refuses": array("<f4", b"\x82\x00" + head(0, 2**63), b""),
    "too many dimensions": array("<f4", b"\x98\x41" + b"\x01" * 65, b"0000"),
    "a gigabyte of nothing": array("|S999999999", b"\x81\x00", b""),
    "records": array("f4,f4", b"\x81\x01", b"0" * 8),
    "void": array("|V8", b"\x81\x01", b"0" * 8),
    "pickles": array("|O", b"\x81\x01", b"0" * 8),
    # numpy divides by this zero and the process is dead, without an exception.
    "a unit of time counted 0 times": array("<M8[0s]", b"\x81\x01", b"0" * 8),
    "code as a field": TAG + b"\x84\x65named\x61P\x81" + text("a=exit()") + b"\x00",
    "a keyword as a field": TAG + b"\x84\x65named\x61P\x81" + text("class") + b"\x00",
    "code as a name": TAG + b"\x83\x65named" + text("P(exit())") + b"\x80",
    "fields that Python takes for one": TAG
    + b"\x85\x65named\x61P\x82"
    + text("\ufb01")
    + text("fi")
    + b"\x00\x00",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_at_once(data: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(CanonicalError) as caught:
        decode(data)
    assert time.monotonic() - began < 5
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", SEEDS, ids=lambda v: type(v).__name__)
def test_every_cut_is_noticed(value: Any) -> None:
    data = encode(value)
    for n in range(len(data)):
        with pytest.raises(CanonicalError):
            decode(data[:n])
    with pytest.raises(CanonicalError, match="1 bytes follow"):
        decode(data + b"\x00")


@pytest.mark.parametrize("wrap", [list, tuple, lambda items: {1: items[0]}, lambda i: Point(*i, 0)])
def test_both_directions_have_the_same_depth_limit(wrap: Any) -> None:
    # The innermost items are no containers, though some look like ones on the wire.
    value: Any = [2**70, "\ud800", np.zeros(2), torch.zeros(1), np.float32(1)]
    for _ in range(NESTING_DEPTH_MAX - 1):
        value = wrap([value])
    data = encode(value)
    assert encode(decode(data)) == data
    with pytest.raises(CanonicalError, match="deeper than 64"):
        encode([value])


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CanonicalError, match="deeper than 64"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\]: an object of type builtins.object"),
        ({"a": {"b": np.array([None])}}, r"value\['a'\]\['b'\]: a numpy dtype object"),
        (np.zeros(1, "f4,f4"), "no canonical form"),
        (np.longdouble(1), "no canonical form"),
        (np.zeros(2, np.clongdouble), "no canonical form"),
        (np.array(["a"], np.dtypes.StringDType()), "no canonical form"),
        (np.ma.masked, "no canonical form"),
        (np.ma.array([1, 2], mask=[0, 1]), "no canonical form"),
        (np.array([(1,)], "i4").view(np.recarray), "no canonical form"),
        (np.void(b"ab"), "no canonical form"),
        (torch.zeros(2, dtype=torch.bfloat16), "torch tensor has no canonical form"),
        (torch.zeros(2, device="meta"), "torch tensor has no canonical form"),
        (torch.eye(2).to_sparse(), "torch tensor has no canonical form"),
        (1j, "builtins.complex"),
        (PurePath("a"), "PurePosixPath"),
        ({float("nan"), float("nan")}, "two members with the same"),
        ({float("nan"): 1, float("nan"): 2}, "two keys with the same"),
        ({1: object(), "k" * 10_000: 1}, r"value\[1\]"),
    ],
)
def test_what_has_no_form_is_refused_by_its_path(value: Any, says: str) -> None:
    with pytest.raises(CanonicalError, match=says) as caught:
        encode(value)
    assert len(str(caught.value)) < 500


class Loud(str):
    def __str__(self) -> str:
        return "loud"


class Odd(bytes):
    def __bytes__(self) -> bytes:
        return b"odd"


class Wrong(int):
    def __int__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (Loud("a"), "a"),
        (Odd(b"a"), b"a"),
        (Wrong(5), 5),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (bytearray(b"a"), b"a"),
        (memoryview(b"abc")[::2], b"ac"),
        (torch.Size([1, 2]), (1, 2)),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
        (
            torch.ones(2, dtype=torch.cfloat).conj(),
            torch.ones(2, dtype=torch.cfloat).conj_physical(),
        ),
    ],
)
def test_a_subclass_is_its_plain_value(value: Any, same: Any) -> None:
    assert encode(value) == encode(same)


def test_bytes_like_input_decodes() -> None:
    data = encode({"a": [1, "b", np.zeros(2)]})
    assert encode(decode(bytearray(data))) == encode(decode(memoryview(data))) == data


def test_zero_and_minus_zero_differ_and_all_nans_are_one() -> None:
    assert encode(0.0) != encode(-0.0)
    assert math.copysign(1, decode(encode(-0.0))) == -1
    assert encode(struct.unpack(">d", b"\xff\xf0\0\0\0\0\0\1")[0]) == encode(math.nan)


def test_numpy_is_imported_only_for_numpys_values() -> None:
    code = (
        "import sys; from dsec_contracts.canonical import decode, encode;"
        "decode(encode([1, 2.5, {'a': (b'x', {1})}])); assert 'numpy' not in sys.modules;"
        f"decode(bytes.fromhex('{encode(np.zeros(2)).hex()}')); assert 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _Shifty(dict[str, int]):
    """Tells another length each time, and more than the dict that it is."""

    told = 0

    def __len__(self) -> int:
        self.told += 1
        return self.told

    def __bool__(self) -> bool:
        return True


class _Spot(NamedTuple):
    x: int
    y: int


class _Leaky(_Spot):
    def __iter__(self) -> Iterator[int]:
        yield from (1, 2, 3)


def test_what_a_class_of_the_user_s_own_tells_of_its_length_is_not_believed() -> None:
    assert decode(encode([_Shifty(a=1, b=2), 5])) == [{"a": 1, "b": 2}, 5]
    with pytest.raises(CanonicalError, match="other fields than values"):
        encode([_Leaky(1, 2), 5])
