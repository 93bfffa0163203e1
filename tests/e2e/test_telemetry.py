"""One session in a receiver of traces: what the README says one finds there, from a whole stack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import RunningStack, running_stack
from tests.otlp import Receiver

from dsec.client.client import Client
from dsec.platform.telemetry.ids import placement_span, session_span

pytestmark = [pytest.mark.stack, pytest.mark.long]

UPSTREAM = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
TRACEPARENT = f"00-{UPSTREAM[0]:032x}-{UPSTREAM[1]:016x}-01"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of what the stack sends."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[RunningStack]:
    """A stack of its own, which is told a receiver."""
    state_dir = tmp_path_factory.mktemp("traced")
    environment = {
        "DSEC_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=let-me-in",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }
    with running_stack(state_dir, **environment) as running:
        yield running


SPY = """
import os


class Agent:
    def __init__(self, session_config):
        self.seen = sorted(name for name in os.environ if "OTEL_EXPORTER" in name or "DSEC" in name)

    def step(self, observation):
        return {"action": int(observation[2] > 0), "extras": {"seen": self.seen}}

    def on_reward(self, reward, done, info):
        assert not self.seen
"""


async def chain_of(client: Client, session: Path, **how: object) -> tuple[str, object]:
    """A session's last chain hash, and its id."""
    group = await client.request(session, traceparent=TRACEPARENT, **how)  # type: ignore[arg-type]
    (summary,) = await client.wait(group, timeout_s=60)
    assert summary.status == "completed", summary
    return str(summary.chain_hash), group.session_ids[0]


async def test_one_session_is_one_trace_over_all_services(
    traced: RunningStack,
    stack: RunningStack,
    receiver: Receiver,
    session_files: Callable[..., Path],
) -> None:
    session = session_files(SPY, max_steps=6)
    async with traced.client() as client:
        chain, session_id = await chain_of(client, session, labels={"dsec.trace": "steps"})
    root, placement = session_span(session_id), placement_span(session_id, 1)
    await asyncio.to_thread(
        receiver.until,
        lambda: (
            {"session", "placement", "start", "step", "request"}
            <= {span.name for span in receiver.of(session_id)}
            and {"tick", "reward", "commit"} <= {span.name for span in receiver.spans}
        ),
    )
    parents = {span.name: span.parent_id for span in receiver.of(session_id)}
    assert parents == {
        "session": 0,
        "request": root.span_id,
        "placement": root.span_id,
        "start": placement.span_id,
        "step": placement.span_id,
    }
    assert all(
        span.links == [UPSTREAM] for span in receiver.of(session_id) if span.name == "request"
    )
    # The ticks of its steps, each in a trace that the reward service and the recorder go on with.
    ticks = [link for span in receiver.of(session_id) if span.name == "step" for link in span.links]
    assert len(ticks) == 6

    def whole() -> bool:
        return all(
            {(span.service, span.name) for span in receiver.spans if span.trace_id == trace_id}
            == {
                ("dsec-env-runtime", "tick"),
                ("dsec-reward", "reward"),
                ("dsec-recorder", "commit"),
            }
            for trace_id, _ in ticks
        )

    await asyncio.to_thread(receiver.until, whole)
    assert {headers["authorization"] for headers in receiver.headers} == {"let-me-in"}
    # What was told is outside of everything that is hashed.
    async with stack.client() as client:
        untraced, _ = await chain_of(client, session)
    assert untraced == chain


PUTS_ASIDE = ("anchor-sync", "evaluator", "reward", "tool")
"""Services that give up a message that nobody can handle, and say so."""


async def test_services_tell_their_numbers(traced: RunningStack, receiver: Receiver) -> None:
    wanted = {
        ("dsec-scheduler", "rus"),
        ("dsec-scheduler", "dsec.sessions.ended"),
        ("dsec-env-runtime", "dsec.steps"),
        ("dsec-reward", "dsec.rewards"),
        ("dsec-recorder", "dsec.commits"),
        ("dsec-recorder", "dsec.recorder.lag"),
        *((f"dsec-{name}", "dsec.dead_letters") for name in PUTS_ASIDE),
    }
    await asyncio.to_thread(receiver.until, lambda: wanted <= receiver.metrics.keys())
