"""CloudEvents in headers: nothing gets into a header that would not come out the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_contracts.envelope import HEADER_CHARS_MAX, PROSE_CHARS_MAX, Envelope, EnvelopeError
from dsec_contracts.session import EndedCircumstance

NOW = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
ascii_words = st.from_regex(r"[!-~]([ -~]{0,40}[!-~])?", fullmatch=True)
optional = st.none() | ascii_words


def envelope(**changes: object) -> Envelope:
    fields = {"id": "e-1", "type": "session.started.v1", "source": "test", "time": NOW}
    return Envelope(**{**fields, **changes})  # type: ignore[arg-type]


@given(
    st.builds(
        Envelope,
        id=ascii_words,
        type=ascii_words,
        source=ascii_words,
        time=st.datetimes(
            min_value=datetime(2, 1, 1),
            max_value=datetime(9998, 1, 1),
            timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))]),
        ),
        subject=optional,
        causationid=optional,
        traceparent=optional,
    )
)
def test_attributes_survive_their_headers(sent: Envelope) -> None:
    headers = sent.headers()
    assert Envelope.parse(headers) == sent
    assert headers["Nats-Msg-Id"] == headers["ce-id"] == sent.id
    assert Envelope.parse({k.title(): v for k, v in headers.items()}) == sent


BAD = ["", " a", "a ", "a\r\nNats-Msg-Id: b", "a\n", "a\0", "größe", "a\x7f", "\u2028", "x" * 1025]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", ["id", "type", "source", "subject", "causationid", "traceparent"])
def test_no_header_can_be_injected(field: str, value: str) -> None:
    with pytest.raises(EnvelopeError, match="header"):
        envelope(**{field: value}).headers()
    header = field if field == "traceparent" else f"ce-{field}"
    with pytest.raises(EnvelopeError, match=header):
        Envelope.parse({**envelope().headers(), header: value})


@given(st.dictionaries(st.sampled_from(list(envelope().headers())), st.text(), min_size=5))
def test_any_headers_give_an_envelope_or_an_envelope_error(headers: dict[str, str]) -> None:
    try:
        parsed = Envelope.parse(headers)
    except EnvelopeError:
        return
    assert Envelope.parse(parsed.headers()) == parsed


@pytest.mark.parametrize("name", ["ce-id", "ce-type", "ce-source", "ce-time"])
def test_a_missing_header_is_named(name: str) -> None:
    headers = envelope().headers()
    del headers[name]
    with pytest.raises(EnvelopeError, match=f"{name} is missing"):
        Envelope.parse(headers)
    with pytest.raises(EnvelopeError, match="missing"):
        Envelope.parse(None)


@pytest.mark.parametrize(
    "time", ["yesterday", "2026-03-02", "2026-03-02T09:30:00", "0001-01-01T00:00:00+23:59", "12"]
)
def test_a_time_that_names_no_moment_is_refused(time: str) -> None:
    with pytest.raises(EnvelopeError, match="ce-time"):
        Envelope.parse({**envelope().headers(), "ce-time": time})


def test_a_time_without_a_zone_is_not_guessed() -> None:
    with pytest.raises(EnvelopeError, match="time zone"):
        envelope(time=NOW.replace(tzinfo=None)).headers()


def test_another_version_of_cloudevents_is_refused() -> None:
    with pytest.raises(EnvelopeError, match="specversion"):
        Envelope.parse({**envelope().headers(), "ce-specversion": "2.0"})


def test_the_longest_header_fits() -> None:
    sent = envelope(id="x" * HEADER_CHARS_MAX)
    assert Envelope.parse(sent.headers()) == sent


@given(st.text(st.characters(exclude_categories=())))
def test_no_exceptions_message_keeps_an_event_from_being_written(message: str) -> None:
    part = EndedCircumstance(message=message)
    back = EndedCircumstance.model_validate_json(part.model_dump_json())
    assert back == part
    assert "\0" not in part.message


def test_a_message_as_long_as_a_book_is_cut() -> None:
    assert len(EndedCircumstance(message="x" * 10**6).message) == PROSE_CHARS_MAX
