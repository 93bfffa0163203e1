"""Names of spans, and which traces are kept."""

from __future__ import annotations

from uuid import UUID

import pytest
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from dsec.platform.telemetry.ids import (
    SpanRef,
    parse_traceparent,
    placement_span,
    request_span,
    session_span,
    start_span,
    step_span,
    tick_span,
)
from dsec.platform.telemetry.sampler import Ratio

PINNED_PLACEMENT = 0xDE14E27977BEAD6D
PINNED_TICK = (0x7C19E337BE4CB2658C6A063BAE896716, 0x1F3D08AA5E125C3E)
IDS = 4_000
UUIDS = st.builds(
    lambda time, rest: UUID(int=time << 80 | 7 << 76 | 2 << 62 | rest),
    st.integers(1 << 40, 1 << 41),
    st.integers(0, (1 << 62) - 1),
)


def uuid7() -> UUID:
    return UUID(str(uuid_utils.uuid7()))


# -- names -------------------------------------------------------------------------------------


def test_all_names_of_a_session_lie_in_the_trace_that_its_id_names() -> None:
    session = uuid7()
    refs = [
        session_span(session),
        request_span(session, "e"),
        *(make(session, n) for make in (placement_span, start_span, step_span) for n in (1, 2)),
    ]
    assert {ref.trace_id for ref in refs} == {session.int}
    assert len({ref.span_id for ref in refs}) == len(refs)


def test_a_name_is_the_same_in_every_process_and_version() -> None:
    # Pinned: of two versions side by side, one may send the parent and the other the child.
    session = UUID("019a2b3c-4d5e-7f60-8a7b-9c0d1e2f3a4b")
    assert placement_span(session, 1) == SpanRef(session.int, PINNED_PLACEMENT)
    assert tick_span("w1-0", 7) == SpanRef(*PINNED_TICK)


def test_ticks_have_traces_of_their_own() -> None:
    assert len({tick_span(lane, n).trace_id for lane in ("a", "b") for n in range(50)}) == 100


@given(UUIDS)
def test_a_header_names_the_span_it_was_made_from(session: UUID) -> None:
    ref = session_span(session)
    assert parse_traceparent(ref.traceparent()) == ref


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "garbage",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_a_malformed_header_names_nothing(text: str | None) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.parametrize("text", [f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-03-more"])
def test_a_header_of_another_version_or_an_unsampled_one_names_a_span(text: str) -> None:
    assert parse_traceparent(text) == SpanRef(int(TRACE, 16), int(SPAN, 16))


# -- the sampler -------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.4, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("ids", ["made at once", "in sequence", "ticks"])
def test_it_keeps_its_share(ratio: float, ids: str) -> None:
    first = uuid7().int
    made = {
        "made at once": lambda n: uuid7().int,
        "in sequence": lambda n: first + n,
        "ticks": lambda n: tick_span("w1-0", n).trace_id,
    }[ids]
    sampler = Ratio(ratio)
    share = sum(sampler.keeps(made(n)) for n in range(IDS)) / IDS
    # Five standard deviations; exact at the ends, where there is none.
    assert abs(share - ratio) <= 5 * (ratio * (1 - ratio) / IDS) ** 0.5


def test_the_bits_of_an_id_would_not_do() -> None:
    """Why there is a sampler of our own: both faults, as they are."""
    sdk = TraceIdRatioBased(0.4)
    ids = [uuid7().int for _ in range(200)]
    assert not any(sdk.should_sample(None, one, "s").decision.is_sampled() for one in ids)
    # 200 ids made within a millisecond or two have one or two values in the top of the 56 bits.
    assert len({one >> 32 & 0xFFF000 for one in ids}) < len(ids) / 4


@given(UUIDS, st.floats(0, 1), st.floats(0, 1))
def test_a_lower_ratio_keeps_a_part_of_what_a_higher_one_keeps(
    session: UUID, a: float, b: float
) -> None:
    low, high = sorted((a, b))
    assert Ratio(low).keeps(session.int) <= Ratio(high).keeps(session.int)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_0_and_1_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Ratio(ratio)
