"""Rows to columns and back."""

from dsec.env_runtime.packing import Row, Sender, heard, pack, split
from dsec.session.io import Stepped
from dsec_contracts import RewardMissing, RewardScored, parse
from dsec_contracts.columns import VarColumn, fixed_rows
from dsec_contracts.reward import RewardColumns, RewardMissingCircumstance, RewardNoticeFact


def row(n: int, fact: bytes = b"f") -> Row:
    stepped = Stepped(
        n, 1, -0.0, True, False, bytes([n]) * 32, fact, b"started", b"o", b"p", b"r", b"x"
    )
    return Sender(bytes([n]) * 16, 2, b"v", "0" * 64), stepped


def test_a_tick_survives_the_wire() -> None:
    rows = [row(1, b"one"), row(2, b"")]
    event = parse("session.stepped.v1", pack(rows, "w", "w-0", 3).body())
    columns = event.row  # type: ignore[attr-defined]
    assert event.rows == 2  # type: ignore[attr-defined]
    assert columns.fact.unpack() == [b"one", b""]
    assert fixed_rows(columns.session_id, 16) == [b"\x01" * 16, b"\x02" * 16]
    assert columns.env_reward == b"\0\0\0\0\0\0\0\x80" * 2  # -0.0 stays -0.0


def test_split_fits_and_loses_nothing() -> None:
    rows = [row(n % 200, b"f" * 1000) for n in range(100)]
    portions = list(split(rows, 20_000))
    assert [r for portion in portions for r in portion] == rows
    assert len(portions) > 1
    for portion in portions:
        assert len(pack(portion, "w", "w-0", 1).body()) <= 20_000


def test_a_row_that_is_too_large_travels_alone() -> None:
    rows = [row(1), row(2, b"f" * 30_000), row(3)]
    assert [len(portion) for portion in split(rows, 20_000)] == [1, 1, 1]


def test_a_message_closes_one_episode_of_a_session() -> None:
    """Several may be published again at once: where lags are longer than episodes."""
    rows = []
    for first in (0, 6, 12):
        for n in (1, 2):
            sender, stepped = row(n)
            rows.append((sender, stepped._replace(step=first + 5, closes_from=first)))
    rows.append(row(1))  # which closes none
    portions = list(split(rows, 20_000))
    assert [one for portion in portions for one in portion] == rows
    for portion in portions:
        told = pack(portion, "w", "w-0", 1).circumstance.closing
        for sender, stepped in portion:
            if stepped.closes_from is not None:
                assert told[sender.session_id.hex()] == stepped.closes_from
    assert [len(portion) for portion in portions] == [2, 2, 2, 1]


def test_replies_become_inputs() -> None:
    columns = RewardColumns(
        session_id=b"\x01" * 16,
        step=(7).to_bytes(4, "little"),
        revision=(1).to_bytes(4, "little"),
        value=b"\0\0\0\0\0\0\xf0?",
        cause=b"c" * 16,
        fact=VarColumn.pack([b"fact"]),
    )
    [(raw_id, given)] = heard(RewardScored(rows=1, row=columns))
    assert raw_id == b"\x01" * 16
    assert (given.kind, given.ordinal, given.value, given.cause) == ("reward", 7, 1.0, b"c" * 16)


def test_a_missing_reward_is_an_input_too() -> None:
    session_id = "0192f0c1-2345-7abc-8def-0123456789ab"
    event = RewardMissing(
        fact=RewardNoticeFact(
            session_id=session_id, step=3, code="reward_raised", fatal=True, cause=b"c" * 16
        ),
        circumstance=RewardMissingCircumstance(message="boom"),
    )
    [(_, given)] = heard(event)
    assert (given.kind, given.code, given.fatal) == ("reward_missing", "reward_raised", True)


def test_rows_name_their_reward_specs() -> None:
    (sender, stepped) = row(2)
    rows = [row(1), (sender._replace(reward_spec="1" * 64), stepped), row(3)]
    circumstance = pack(rows, "w", "w-0", 1).circumstance
    assert circumstance.reward_specs == {"": "0" * 64, ("02" * 16): "1" * 64}
