"""Keys, subjects and the one name of every event."""

from __future__ import annotations

import inspect
import re
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dsec_contracts import keys, subjects
from dsec_contracts.catalog import BY_TYPE, EVENTS
from dsec_contracts.envelope import Event

NOW = datetime(2026, 3, 2, tzinfo=UTC)
MS_2020 = 1_577_836_800_000
MS_9999 = 253_402_300_799_000

any_text = st.text(st.characters(exclude_categories=()))


def uuid7(ms: int, rest: int = 0) -> uuid.UUID:
    rest &= (1 << 62) - 1
    return uuid.UUID(int=ms << 80 | 7 << 76 | 2 << 62 | rest)


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.__name__)
def test_class_type_subject_and_handler_are_one_name(event: type[Event]) -> None:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", event.__name__).lower().split()
    noun, verb = words[0], "_".join(words[1:])
    assert event.event_name() == f"{noun}.{verb}"
    assert event.event_type() == f"{noun}.{verb}.v{event.version}"
    assert event.handler_name() == f"on_{noun}_{verb}"
    assert subjects.subject(event.event_name(), "k") == f"dsec.{noun}.{verb}.k"
    assert subjects.every(event.event_name()) == f"dsec.{noun}.{verb}.*"
    assert subjects.start(event.event_name()) == f"dsec.{noun}.{verb}."
    assert BY_TYPE[event.event_type()] is event
    assert event.__doc__


def test_the_readme_names_every_natural_key() -> None:
    readme = (Path(__file__).parents[2] / "contracts" / "README.md").read_text()
    made = re.findall(r'return f"([a-z_]+:)', inspect.getsource(keys))
    words = (keys.REQUESTED, keys.CANCEL_REQUESTED, keys.STARTED, keys.ENDED, keys.SANITY_CHECKED)
    assert len(made) > 15
    assert not [prefix for prefix in made if f"`{prefix}" not in readme]
    assert not [word for word in words if f"`{word}`" not in readme]


def test_no_two_events_share_a_name() -> None:
    assert len(BY_TYPE) == len(EVENTS) == len({e.handler_name() for e in EVENTS})


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.__name__)
def test_the_stream_captures_what_is_durable_and_nothing_else(event: type[Event]) -> None:
    subject = subjects.subject(event.event_name(), "k")
    assert any(_matches(f, subject) for f in subjects.STREAM_SUBJECTS) == event.durable


def test_the_stream_captures_fences_and_dead_letters_but_no_replies() -> None:
    captured = [subjects.fence("w"), subjects.dead_letter("recorder")]
    for subject in captured:
        assert sum(_matches(f, subject) for f in subjects.STREAM_SUBJECTS) == 1
    for subject in ("_INBOX.a.b", "$JS.API.INFO", "dsec.worker.heartbeat.w"):
        assert not any(_matches(f, subject) for f in subjects.STREAM_SUBJECTS)


def _matches(pattern: str, subject: str) -> bool:
    regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(regex, subject) is not None


@given(any_text)
def test_a_token_is_one_token_or_refused(text: str) -> None:
    try:
        token = subjects.token(text)
    except ValueError:
        token = subjects.any_token(text)
        assert re.fullmatch("[0-9a-f]{64}", token)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,128}", token)
    assert subjects.token(token) == token == subjects.any_token(token)


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "ä", "a\n", "x" * 129])
def test_wildcards_dots_and_spaces_never_enter_a_subject(bad: str) -> None:
    for make in (subjects.fence, subjects.dead_letter, subjects.token):
        with pytest.raises(ValueError, match="subject token"):
            make(bad)
    with pytest.raises(ValueError, match="subject token"):
        subjects.subject("session.started", bad)


@given(st.integers(MS_2020, MS_9999), st.integers(0))
def test_a_session_id_carries_its_time(ms: int, rest: int) -> None:
    session_id = uuid7(ms, rest)
    assert keys.check_session_id(session_id) == session_id
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert abs(keys.session_time(session_id) - epoch - timedelta(milliseconds=ms)) < timedelta(
        milliseconds=1
    )


@given(st.uuids())
def test_any_uuid_is_a_session_id_or_refused(value: uuid.UUID) -> None:
    try:
        keys.check_session_id(value)
    except ValueError:
        return
    assert value.version == 7


@pytest.mark.parametrize(
    "value",
    [
        uuid.UUID(int=0),
        uuid.UUID(int=2**128 - 1),
        uuid7(MS_2020 - 1),
        uuid7(MS_9999 + 1000),
        uuid7(2**48 - 1),
        uuid.uuid4(),
        uuid.uuid1(),
        uuid.UUID(int=uuid7(MS_2020).int & ~(3 << 62)),  # version 7 of another variant
    ],
)
def test_what_is_no_session_id_is_refused(value: uuid.UUID) -> None:
    with pytest.raises(ValueError, match=r"UUIDv7|outside the years"):
        keys.check_session_id(value)


def test_the_system_session_is_the_first_possible_one() -> None:
    assert keys.check_session_id(keys.SYSTEM_SESSION) == keys.SYSTEM_SESSION
    assert keys.session_time(keys.SYSTEM_SESSION) == keys.SESSION_EARLIEST
    with pytest.raises(ValidationError, match="stands for events about no session"):
        TypeAdapter(keys.SessionId).validate_python(keys.SYSTEM_SESSION)


def test_a_clock_that_is_far_off_is_noticed() -> None:
    ms = int(NOW.timestamp() * 1000)
    assert keys.check_session_window(uuid7(ms), NOW) is None
    assert "ahead" in str(keys.check_session_window(uuid7(ms + 2 * 86_400_000), NOW))
    assert "ago" in str(keys.check_session_window(keys.SYSTEM_SESSION, NOW + timedelta(days=9999)))


numbers = st.integers(0, 3) | st.integers(0, 10**9)
words = st.from_regex(r"[A-Za-z0-9_\-]{1,8}", fullmatch=True)
named_keys = st.one_of(
    st.tuples(st.just("step"), numbers),
    st.tuples(st.just("reward"), numbers, numbers),
    st.tuples(st.just("reward_deferred"), numbers),
    st.tuples(st.just("reward_missing"), numbers),
    st.tuples(st.just("placed"), numbers),
    st.tuples(st.just("released"), numbers),
    st.tuples(st.just("rejected"), words),
    st.tuples(st.just("fenced"), words),
    st.tuples(st.just("spec"), words),
    st.tuples(st.just("policy"), words, words),
    st.tuples(st.just("service"), words, numbers),
    st.tuples(st.just("service_mode"), words, numbers),
)


@given(st.lists(named_keys, max_size=30, unique=True))
def test_different_events_have_different_keys(events: list[tuple[str, ...]]) -> None:
    made = {getattr(keys, kind)(*parts) for kind, *parts in events}
    made |= {keys.REQUESTED, keys.CANCEL_REQUESTED, keys.STARTED, keys.ENDED}
    assert len(made) == len(events) + 4


def test_a_key_has_a_name_anywhere() -> None:
    assert keys.of(keys.SYSTEM_SESSION, keys.step(4)) == f"{keys.SYSTEM_SESSION}/step:4"


def test_calls_are_numbered_in_their_order() -> None:
    places = [
        (0, 0, 0),
        (0, 0, 63),
        (0, 1, 0),
        (0, 255, 63),
        (1, 0, 0),
        (keys.ORDINAL_MAX, 255, 63),
    ]
    ordinals = [keys.call_ordinal(*place) for place in places]
    assert ordinals == sorted(set(ordinals))
    assert ordinals[-1] < 2**63
    assert keys.call_id(3, 1, 2) == "call_3_1_2"
    assert keys.tool_result(3, 1, 2) == "tool_result:3.1.2"
