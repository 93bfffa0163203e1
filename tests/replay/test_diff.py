"""The first difference of two sessions, in few rows."""

import math
from base64 import urlsafe_b64decode

import pytest

from dsec.replay.diff import LogSource, RowsSource, diff
from dsec.session.chain import chain_next, chain_start
from dsec.session.log_row import RecordedGap
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS


async def compare(a, b):
    return await diff(RowsSource(a), RowsSource(b))


def rechained(rows, step, name, value):
    """The log of a session in which one field was otherwise: all later hashes differ."""
    result, chain = [], b""
    for row in rows:
        if row.key == "started":
            chain = row.chain
        if row.kind != "session.stepped":
            result.append(row)
            continue
        fact = decode(row.fact)
        if row.step == step:
            fact[STEP_FIELDS.index(name)] = value
        chain = chain_next(chain, encode(fact))
        result.append(row._replace(fact=encode(fact), chain=chain))
    return result


async def test_a_session_equals_itself(rows):
    difference = await compare(rows, list(reversed(rows)))
    assert difference.equal
    assert difference.first_difference is None


@pytest.mark.parametrize("name", STEP_FIELDS)
@pytest.mark.parametrize("step", [0, 1, 22, 38, 39])
async def test_the_step_and_the_field_are_named(rows, step, name):
    difference = await compare(rows, rechained(rows, step, name, "other"))
    first = difference.first_difference
    assert (first.step, first.field, first.b) == (step, name, "other")
    assert encode(first.a) == encode(
        decode(next(r for r in rows if r.key == f"step:{step}").fact)[STEP_FIELDS.index(name)]
    )
    assert difference.rows_read <= 2 * math.log2(40) + 10


async def test_it_reads_few_rows_of_long_sessions(rows):
    steps = [r for r in rows if r.kind == "session.stepped"]
    long, n = rows[:1], 3000
    for k in range(n):
        fact = decode(steps[k % 40].fact)
        fact[0] = k
        long.append(steps[k % 40]._replace(step=k, key=f"step:{k}", fact=encode(fact)))
    long = rechained(long, -1, "step", 0)
    for step in (0, 1, 1234, 2047, 2998, 2999):
        difference = await compare(long, rechained(long, step, "info", {"x": 1}))
        assert difference.first_difference.step == step
        assert difference.rows_read <= 2 * math.log2(n) + 10
    assert (await compare(long, long)).rows_read <= 6


async def test_sessions_of_different_lengths(cartpole, rows):
    shorter = cartpole.rows(max_steps=25)
    difference = await compare(rows, shorter)
    first = difference.first_difference
    assert (first.step, first.field, first.a, first.b) == (25, "recorded", True, False)
    first = (await compare(shorter, rows)).first_difference
    assert (first.step, first.field, first.a, first.b) == (25, "recorded", False, True)
    differing = rechained(rows, 10, "action", 9)
    first = (await compare(shorter, differing)).first_difference
    assert (first.step, first.field) == (10, "action")


@pytest.mark.parametrize(
    ("name", "value"),
    [("status", "failed"), ("code", "oom"), ("steps", 3), ("episodes", 3), ("inputs", "gA==")],
)
async def test_different_ends(rows, name, value):
    end = rows[-1]._replace(fact=encode({**decode(rows[-1].fact), name: value}))
    first = (await compare(rows, [*rows[:-1], end])).first_difference
    assert (first.step, first.field) == (None, name)


async def test_one_that_has_not_ended_one_that_has_not_started_and_empty_ones(rows):
    first = (await compare(rows, rows[:-1])).first_difference
    assert (first.step, first.field, first.a, first.b) == (None, "ended", True, False)
    first = (await compare([], rows)).first_difference
    assert (first.step, first.field, first.a, first.b) == (None, "started", False, True)
    assert (await compare([], [])).equal
    assert (await compare(rows[:1], rows[:1])).equal
    first = (await compare(rows[:1], rows)).first_difference
    assert (first.step, first.field) == (0, "recorded")


async def test_different_resets_name_the_part(cartpole, rows):
    first = (await compare(rows, cartpole.rows(seed=8))).first_difference
    assert (first.step, first.field) == (None, "reset.state_hash")
    assert first.a != first.b


async def test_a_hash_that_is_not_of_its_fact(rows):
    false = [r._replace(chain=b"\0" * 32) if r.key == "step:39" else r for r in rows]
    first = (await compare(rows, false)).first_difference
    assert (first.step, first.field) == (39, "chain")


async def test_a_gap_is_an_error(rows):
    other = rechained(rows, 0, "action", 9)
    with pytest.raises(RecordedGap):
        await compare(rows, [r for r in other if r.key != "step:19"])


async def test_the_database_is_asked_by_key(rows):
    asked = []

    class Reader:
        async def row(self, session_id, key):
            asked.append(key)
            return next((r for r in rows if r.key == key), None)

        async def last_step(self, session_id):
            return 39

    difference = await diff(LogSource(Reader(), rows[0].session_id), RowsSource(rows))
    assert difference.equal
    assert asked == ["started", "step:39", "ended"]


def test_chain_start_is_what_the_first_hash_is_made_of(rows):
    reset = decode(rows[0].fact)["reset"]
    assert chain_start(urlsafe_b64decode(reset)) == rows[0].chain
