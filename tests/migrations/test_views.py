"""The views on real servers."""

from __future__ import annotations

import json
import random
import struct
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from tests.session.shuffled import run_shuffled

from dsec.replay.fold import fold
from dsec.reward.fact import reward_fact
from dsec.reward.score import EnvScorer
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import SessionConfig
from dsec.session.local import local_program
from dsec_contracts import SYSTEM_SESSION
from dsec_contracts.canonical import decode
from dsec_contracts.keys import session_time

pytestmark = pytest.mark.postgres
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
A = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
B = UUID("01a22b62-cb9b-7845-b0fc-9a0059a193e6")
REQUEST = {"seed": 7, "labels": {"team": "blue"}, "group_id": "g", "max_steps": 3}


def test_the_summary_of_a_session_over_its_life(log: Any) -> None:
    log.put(A, "requested", "session.requested", fact_json=REQUEST, policy="sales@v1")
    log.put(B, "requested", "session.requested", fact_json=REQUEST)
    assert log.status(A) == "queued"
    log.put(A, "placed:1", "session.placed", attempt=1, fact_json={"worker": "w1"})
    log.put(A, "placed:2", "session.placed", attempt=2, fact_json={"worker": "w2"})
    assert log.status(A) == "running"
    log.put(A, "started", "session.started", chain=b"\7" * 32)
    columns = "steps, episodes, reward_total, rewards_missing, attempts, chain_hash, policy"
    summary = f"select {columns} from session_summary where session_id = %s"
    assert log.one(summary, A) == (0, 0, None, 0, 2, "07" * 32, "sales@v1")
    log.step(A, 0, terminated=True)
    log.step(A, 1)
    log.step(A, 2)
    log.put(A, "reward:0.1", "reward.scored", step=0, value=1.0)
    log.put(A, "reward:0.2", "reward.scored", step=0, value=10.0)
    log.put(A, "reward:0.10", "reward.scored", step=0, value=100.0)
    log.put(A, "reward:1.1", "reward.scored", step=1, value=-0.5)
    log.put(A, "reward_missing:0", "reward.missing", step=0, fact_json={"code": "late"})
    log.put(A, "reward_missing:2", "reward.missing", step=2, fact_json={"code": "gone"})
    assert log.one(summary, A) == (3, 1, 99.5, 1, 2, "02" * 32, "sales@v1")
    assert log.one(summary, B) == (0, 0, None, 0, 0, None, None)
    fact = {"status": "completed", "code": "max_steps", "steps": 3, "episodes": 1}
    log.put(A, "ended", "session.ended", chain=b"\x0a" * 32, fact_json=fact)
    assert log.status(A) == "completed"
    assert log.one(summary, A) == (3, 1, 99.5, 1, 2, "0a" * 32, "sales@v1")
    found = log.one(
        "select code, seed, labels, group_id, max_steps, ended_at from session_summary"
        " where session_id = %s and session_at = session_time(%s)",
        A,
        A,
    )
    assert found == ("max_steps", 7, {"team": "blue"}, "g", 3, NOW)


def test_a_rejected_request_is_not_queued(log: Any) -> None:
    log.put(A, "requested", "session.requested", fact_json=REQUEST, event_id="r1")
    fact = {"event_id": "r1", "code": "unregistered_spec", "field": "env_spec"}
    circumstance = {"message": "no\0 such spec"}
    log.put(
        SYSTEM_SESSION,
        "rejected:r1",
        "session.rejected",
        fact_json=fact,
        circumstance=circumstance,
    )
    assert log.status(A) == "rejected"
    assert log.one("select code, field, event_id from rejection") == (
        "unregistered_spec",
        "env_spec",
        "r1",
    )
    assert log.one("select message from rejection") == ("no\N{SYMBOL FOR NULL} such spec",)


def test_traces(log: Any) -> None:
    log.put(A, "requested", "session.requested", fact_json=REQUEST)
    log.step(A, 0, episode=0, truncated=True, cause="started")
    log.step(A, 1, episode=1, value=float("nan"), cause="reward:0.1")
    log.put(A, "reward:1.1", "reward.scored", step=1, value=2.0, cause="step:1")
    log.put(A, "reward_missing:0", "reward.missing", step=0, fact_json={"code": "gone"})
    log.put(A, "ended", "session.ended", fact_json={"code": "max_steps", "steps": 2})
    traced = log.connection.execute(
        "select step, episode, revision, reward, env_reward::text, missing, group_id"
        " from reward_trace where session_id = %s order by step",
        (A,),
    ).fetchall()
    assert traced == [(0, 0, None, None, "1", "gone", "g"), (1, 1, 1, 2.0, "NaN", None, "g")]
    steps = log.connection.execute(
        "select step, terminated, truncated, cause from step_trace order by step"
    ).fetchall()
    # The session was cut by max_steps: its last row reads as truncated.
    assert steps == [(0, False, True, "started"), (1, False, True, "reward:0.1")]


def test_causes_lead_through_sessions(log: Any) -> None:
    log.put(A, "started", "session.started", cause="placed:1")
    log.put(B, "requested", "session.requested", fact_json=REQUEST, cause=f"{A}/ended")
    log.put(SYSTEM_SESSION, "rejected:x", "session.rejected", cause=f"{B}/requested")
    edges = log.connection.execute("select effect, cause from causal_edge order by 1").fetchall()
    assert edges == [
        (f"{SYSTEM_SESSION}/rejected:x", f"{B}/requested"),
        (f"{A}/started", f"{A}/placed:1"),
        (f"{B}/requested", f"{A}/ended"),
    ]


def test_placements_specs_and_policies(log: Any) -> None:
    fact = {"worker": "w1", "lane": "l1", "stage": "main", "alone": True}
    circumstance = {"reason": "admitted", "request": {"labels": {"a": "\0"}}}
    log.put(A, "placed:1", "session.placed", attempt=1, fact_json=fact, circumstance=circumstance)
    found = log.one("select worker, lane, previous_lane, alone, reason from placement")
    assert found == ("w1", "l1", None, True, "admitted")
    log.put(
        SYSTEM_SESSION,
        "spec:aa",
        "spec.registered",
        fact_json={"spec_hash": "aa", "kind": "env"},
        circumstance={"name": "shop"},
    )
    assert log.one("select spec_hash, kind, name from spec") == ("aa", "env", "shop")
    fact = {"name": "sales", "version": "v1", "content_hash": "cc", "blob": "bb", "size_bytes": 9}
    log.put(SYSTEM_SESSION, "policy:sales.v1", "policy.published", fact_json=fact)
    assert log.one("select name, version, size_bytes from policy") == ("sales", "v1", 9)


def test_one_session_is_found_through_the_key_alone(log: Any) -> None:
    """Never a scan; with the session's time given, of one partition only."""
    log.connection.execute("select event_log_partition(%s, 99)", (session_time(A),))
    log.connection.execute("set enable_seqscan = off")
    for view in ("session_summary", "reward_trace", "step_trace", "causal_edge"):
        (plan,) = log.one(
            f"explain (format json) select * from {view}"
            " where session_id = %s and session_at = session_time(%s)",
            A,
            A,
        )
        text = json.dumps(plan)
        assert "Seq Scan" not in text, view
        if view in ("step_trace", "causal_edge"):  # the others leave it to run time
            assert "event_log_default" not in text, view


def test_a_tool_call_stands_beside_what_came_of_it(log: Any) -> None:
    calls = [
        {"id": f"call_2_0_{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(("search", "add", "search"))
    ]
    fact = {"step": 2, "turn": 0, "calls": calls}
    log.put(A, "tool_call:2.0", "tool.called", fact_json=fact)
    told = {"seconds": 0.5, "replica": "a\0b"}
    log.put(A, "tool_result:2.0.0", "tool.returned", fact_json={}, circumstance=told)
    failed = {"code": "deadline", "message": "too long"}
    log.put(A, "tool_result:2.0.1", "tool.failed", fact_json=failed, circumstance={})
    rows = log.connection.execute(
        "select step, turn, call, call_id, tool, arguments, status, code, message, seconds"
        " from tool_call order by call"
    ).fetchall()
    assert rows == [
        (2, 0, 0, "call_2_0_0", "search", "{}", "returned", None, None, 0.5),
        (2, 0, 1, "call_2_0_1", "add", "{}", "failed", "deadline", "too long", None),
        (2, 0, 2, "call_2_0_2", "search", "{}", "waiting", None, None, None),
    ]


def test_an_anchor_stands_beside_what_became_of_its_blob(log: Any) -> None:
    for position, tags in ((10, ["every_steps"]), (20, ["agent"]), (30, [])):
        fact = {
            "position": position,
            "anchor_id": f"a{position}",
            "tags": tags,
            "parents": [f"a{position - 10}"] if position > 10 else [],
            "covers_agent": True,
            "fold_version": 1,
        }
        told = {"blob": f"b{position}", "size_bytes": 5, "worker": "a\0b"}
        log.put(
            A, f"anchor:{position}", "anchor.captured", fact_json=fact, circumstance=told, attempt=1
        )
    stored = {"position": 10, "blob": "b10", "size_bytes": 5}
    log.put(A, "anchor_result:10", "anchor.stored", fact_json=stored, circumstance={})
    lost = {"position": 20, "code": "blob_missing"}
    log.put(
        A, "anchor_result:20", "anchor.lost", fact_json=lost, circumstance={"message": "no\0 blob"}
    )
    rows = log.connection.execute(
        "select position, anchor_id, tags, parent, status, code, message, blob, size_bytes,"
        " stored_at is null from anchor order by position"
    ).fetchall()
    gone = "no\N{SYMBOL FOR NULL} blob"
    assert rows == [
        (10, "a10", ["every_steps"], None, "stored", None, None, "b10", 5, False),
        (20, "a20", ["agent"], "a10", "lost", "blob_missing", gone, "b20", 5, True),
        (30, "a30", [], "a20", "captured", None, None, "b30", 5, True),
    ]


SCORES = [0.0, -0.0, 1.0, -1.5, 0.1, 1e300, -1e-300, 5e-324, 2.2250738585072014e-308, 1e16,
          1.7976931348623157e308, float("inf"), float("-inf"), float("nan")]  # fmt: skip


def test_components_are_the_recorded_ones_to_the_bit(log: Any) -> None:
    chance = random.Random(1)
    expected = {}
    for n, step in enumerate([0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1]):
        names = ["gmv", "", "µ\0é\\000", "x" * 30, "y" * 300][: n + 1]
        names += [f"many-{k}" for k in range(30 * (n == 3) + 300 * (n == 4))]
        some = [*SCORES, *(struct.unpack("<d", chance.randbytes(8))[0] for _ in range(40))]
        components = {name: [chance.choice(some), chance.choice(some)] for name in names}
        fact = reward_fact(step, 300 if n else 1, chance.choice(some), components, bytes(16))
        log.put(A, f"reward:{step}.{300 if n else 1}", "reward.scored", step=step, fact=fact)
        expected.update({(step, name): pair for name, pair in components.items()})
    rows = log.connection.execute(
        "select step, revision, name, score, weight from reward_component where session_id = %s",
        (A,),
    ).fetchall()
    found = {(r[0], r[2].replace("\N{SYMBOL FOR NULL}", "\0")): list(r[3:]) for r in rows}
    assert len(rows) == len(found) == len(expected)
    for key, pair in expected.items():
        assert [struct.pack(">d", v) if v == v else "nan" for v in found[key]] == [
            struct.pack(">d", v) if v == v else "nan" for v in pair
        ], key
    assert {r[1] for r in rows if r[0]} == {300}


@pytest.mark.parametrize("fact", [b"", b"\x85", b"\x85\x00\x01", b"\xff" * 40, b"f", b"\x85\x18"])
def test_bytes_that_are_no_reward_have_no_components(log: Any, fact: bytes) -> None:
    log.put(A, "reward:0.1", "reward.scored", step=0, fact=fact)
    assert log.connection.execute("select * from reward_component").fetchall() == []


@pytest.mark.parametrize("lag", [{"reward_lag_steps_max": 4}, {"lag_steps": 3}])
def test_a_deferred_reward_stands_beside_when_it_was_delivered(
    log: Any, lag: dict[str, int]
) -> None:
    agent = (
        "class Agent:\n    def __init__(self, config): pass\n"
        "    def step(self, observation): return {'action': 0}\n"
    )
    program = local_program(
        AgentDocument(entry="agent.py:Agent"),
        {"agent.py": agent.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )
    config = SessionConfig(3, 30, **lag)
    rows = run_shuffled(program, config, A, EnvScorer(), random.Random(1), deferred_share=0.7)
    for row in rows:
        fact_json = {}
        if row.kind not in ("session.stepped", "reward.scored"):
            fact_json = decode(row.fact)
        put = {"step": row.step, "value": row.value, "fact": row.fact, "fact_json": fact_json}
        log.put(A, row.key, row.kind, **put)
    found = log.connection.execute(
        "select step, code, delivered_before_step, reward, answered_at is null"
        " from deferred_reward where session_id = %s order by step",
        (A,),
    ).fetchall()
    expected = fold(rows).deferred
    assert len(expected) > 10
    assert [tuple(row[:3]) for row in found] == [
        (one.step, one.code, one.delivered_before) for one in expected
    ]
    assert {row[3:] for row in found} == {(1.0, False)}
