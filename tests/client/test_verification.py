"""Verification in a process of its own, whatever user code does to that process."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.platform.objects import ObjectStore
from dsec.reward.score import load_scorer
from dsec.session.documents import AgentDocument, EnvDocument, RewardDocument, seal
from dsec.session.io import SessionConfig
from dsec.session.local import run_in_memory
from dsec.session.log_row import LogRow
from dsec.session.program import load_program
from dsec_contracts import SYSTEM_SESSION, decode, encode, keys
from dsec_contracts.keys import session_time
from dsec_contracts.session import RequestFact

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(150)]

STEPS = 5
AGENT = (
    b"class A:\n    def __init__(self, c): ...\n    def step(self, o):\n"
    b"        return {'action': 0}\n"
)
FAILS = AGENT.replace(b"        return", b"        assert o[0] < -1, 'too far'\n        return")
ENV = seal("env", EnvDocument(entry="gymnasium:CartPole-v1"), {})


def agent_of(source: bytes) -> tuple[str, bytes]:
    return seal("agent", AgentDocument(entry="agent.py:A"), {"agent.py": source})


def reward_of(body: str) -> tuple[str, bytes]:
    return seal("reward", RewardDocument(entry="reward.py:score"), {"reward.py": body.encode()})


GOOD = reward_of("def score(t, services):\n    return 1.0\n")


class Log:
    """A database with sessions that ran in memory."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = psycopg.connect(url, autocommit=True)
        self._sequence = 0

    def close(self) -> None:
        self._connection.close()

    def session(
        self,
        reward: tuple[str, bytes],
        n: int,
        agent: tuple[str, bytes] | None = None,
        *,
        without: str = "",
        never_started: str | None = None,
        policy: str | None = None,
        blobs: dict[str, str] | None = None,
    ) -> UUID:
        """A session whose steps were given 1.0, and whose request names this reward. `without`: a
        kind of spec that the log does not have. `never_started`: why it ended. `blobs`: those that
        lie in the object store."""
        agent = agent or agent_of(AGENT)
        session_id = UUID(int=(1_767_225_600_000 << 80) | (7 << 76) | (2 << 62) | n)
        for kind, (spec_hash, content) in (("agent", agent), ("env", ENV), ("reward", reward)):
            if kind != without:
                self._spec(kind, spec_hash, content, (blobs or {}).get(kind))
        request = RequestFact(
            session_id=session_id,
            agent_spec=agent[0],
            env_spec=ENV[0],
            reward_fn_hash=reward[0],
            seed=7,
            max_steps=STEPS,
            creation_timestamp=session_time(session_id),
            policy=policy,
        )
        program = load_program(*agent, *ENV)
        config = SessionConfig(7, STEPS)
        for row in run_in_memory(program, config, session_id, load_scorer(*GOOD), request=request):
            if never_started is None or row.kind in ("session.requested", "session.ended"):
                told = {name: getattr(row, name) for name in LogRow._fields}
                if never_started is not None and row.kind == "session.ended":
                    fact = decode(row.fact) | {"status": "failed", "code": never_started}
                    told["fact"] = encode(fact)
                self._put(told)
        return session_id

    def _spec(self, kind: str, spec_hash: str, content: bytes, blob: str | None) -> None:
        text = base64.urlsafe_b64encode(content).decode() if blob is None else ""
        fact = {"spec_hash": spec_hash, "kind": kind, "content": text, "blob": blob}
        self._put(
            {
                "session_id": SYSTEM_SESSION,
                "key": keys.spec(spec_hash),
                "kind": "spec.registered",
                "version": 1,
                "epoch": 1,
                "index": 0,
                "fact": encode(fact),
                "event_id": f"spec.{spec_hash}",
                "event_time": session_time(SYSTEM_SESSION),
            }
        )

    def _put(self, row: dict[str, Any]) -> None:
        self._sequence += 1
        row |= {"sequence": self._sequence, "session_at": session_time(row["session_id"])}
        if row.get("circumstance") is not None:
            row["circumstance"] = json.dumps(row["circumstance"])
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(["%s"] * len(row))
        statement = f"insert into event_log ({names}) values ({marks}) on conflict do nothing"
        self._connection.execute(statement, list(row.values()))


@pytest.fixture
async def log(log_url: str) -> AsyncIterator[Log]:
    made = Log(log_url)
    yield made
    made.close()


async def verified(
    log: Log, ids: list[UUID], object_store_url: str = "", **how: Any
) -> list[dict[str, Any]]:
    """The verdicts."""
    async with Client(
        nats_url="nats://unused", database_url=log.url, object_store_url=object_store_url
    ) as c:
        return await verify_sessions(c, ids, **how)


EVIL = {
    "raises": "def score(t, services):\n    raise SystemExit('no more')\n",
    "interrupts": (
        "class F:\n    @property\n    def weights(self): raise KeyboardInterrupt('a property')\n"
        "    def __call__(self, t, services): return 1.0\nscore = F()\n"
    ),
    "exits": "import os\ndef score(t, services):\n    os._exit(3)\n",
    "hangs": "import os\ndef score(t, services):\n    os.read(os.pipe()[0], 1)\n",
}


async def test_what_a_reward_function_does_costs_its_own_session_alone(log: Log) -> None:
    ids = [log.session(reward_of(body), n) for n, body in enumerate(EVIL.values())]
    ids.append(log.session(GOOD, 9))
    told = await verified(log, ids, deadline_s=8)
    found = dict(zip([*EVIL, "good"], told, strict=True))
    assert found["good"]["ok"]
    assert (found["good"]["steps"], found["good"]["reward_ok"]) == (STEPS, True)
    for name, said in (("raises", "no more"), ("interrupts", "a property")):
        verdict = found[name]
        assert (verdict["ok"], verdict["reward_ok"], verdict["error"]) == (False, False, None)
        assert verdict["steps"] == STEPS, "the steps themselves are compared all the same"
        assert said in verdict["first_divergence"]["actual"]
    for name, said in (("exits", "exit code 3"), ("hangs", "longer than 8 s")):
        assert not found[name]["ok"]
        assert said in found[name]["error"]


async def test_user_code_finds_no_secret(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_NATS_URL", "nats://x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("PGPASSWORD", "x")
    monkeypatch.setenv("UPSTREAM", "https://me:hidden@host/")
    body = (
        "import os\ndef score(t, services):\n"
        "    env = open('/proc/self/environ').read() + repr(dict(os.environ)) + "
        "open('/proc/self/cmdline').read()\n"
        "    bad = [w for w in ('DSEC_', 'SECRET', 'PGPASS', 'hidden', 'sql:') if w in env]\n"
        "    assert not bad, bad\n    return 1.0\n"
    )
    (verdict,) = await verified(log, [log.session(reward_of(body), 1)])
    assert verdict["ok"], verdict


async def test_a_verdict_names_the_recorded_end(log: Log) -> None:
    (verdict,) = await verified(log, [log.session(GOOD, 1, agent_of(FAILS))])
    assert verdict["ok"]
    assert (verdict["ended"]["status"], verdict["ended"]["code"]) == ("failed", "agent_raised")
    assert "too far" in verdict["ended"]["message"]


@pytest.mark.parametrize("kind", ["agent", "env"])
async def test_a_spec_that_is_absent_is_said_to_be_absent(log: Log, kind: str) -> None:
    spec_hash = agent_of(AGENT)[0] if kind == "agent" else ENV[0]
    (verdict,) = await verified(log, [log.session(GOOD, 1, without=kind)])
    assert not verdict["ok"]
    assert f"{kind} spec {spec_hash} is not in the log" in verdict["error"]


async def test_a_session_that_ended_for_an_absent_spec_verifies(log: Log) -> None:
    ended = log.session(GOOD, 1, without="agent", never_started="spec_not_found")
    others = ("agent_load_failed", "policy_not_found")
    otherwise = [
        log.session(GOOD, n, without="agent", never_started=code)
        for n, code in enumerate(others, 2)
    ]
    first, *rest = await verified(log, [ended, *otherwise])
    assert (first["ok"], first["ended"]["code"]) == (True, "spec_not_found")
    for one in rest:
        assert not one["ok"]
        assert "is not in the log" in one["error"]


async def test_a_session_that_ended_for_an_absent_policy_verifies(log: Log) -> None:
    codes = ("policy_not_found", "agent_load_failed")
    ids = [
        log.session(GOOD, n, policy="p@1", never_started=code) for n, code in enumerate(codes, 1)
    ]
    first, second = await verified(log, ids)
    assert (first["ok"], first["ended"]["code"]) == (True, "policy_not_found")
    assert not second["ok"]
    assert "the log has no policy p@1" in second["first_divergence"]["actual"]


async def test_without_its_reward_spec_a_sessions_steps_are_verified(log: Log) -> None:
    (verdict,) = await verified(log, [log.session(GOOD, 1, without="reward")])
    assert (verdict["ok"], verdict["reward_ok"], verdict["steps"]) == (False, False, STEPS)
    assert f"spec_not_found: reward spec {GOOD[0]}" in verdict["first_divergence"]["actual"]


async def test_a_tampered_blob_is_found_and_named(log: Log, tmp_path: Path) -> None:
    """Other code in the place of what ran: under the name of the right blob, or as another one."""
    url = tmp_path.as_uri()
    objects = ObjectStore(url)
    spec_hash, content = agent_of(AGENT)
    other = objects.put(agent_of(AGENT.replace(b"0}", b"1}"))[1])
    damaged = objects.put(content)
    whole = log.session(GOOD, 1, blobs={"agent": damaged})
    assert (await verified(log, [whole], url))[0]["ok"]
    # More of the same content does no harm; other content under its name does.
    (path,) = [path for path in tmp_path.rglob("*") if damaged in path.name]
    path.write_bytes(next(p for p in tmp_path.rglob("*") if other in p.name).read_bytes())
    (verdict,) = await verified(log, [whole], url)
    assert not verdict["ok"]
    assert f"blob {damaged[:12]} is damaged" in verdict["error"]
    named = log.session(GOOD, 2, agent_of(FAILS), blobs={"agent": other})
    (verdict,) = await verified(log, [named], url)
    assert not verdict["ok"]
    assert f"agent spec {agent_of(FAILS)[0]} has another hash" in verdict["error"]
    gone = log.session(GOOD, 3, agent_of(AGENT + b"\n"), blobs={"agent": "0" * 64})
    (verdict,) = await verified(log, [gone], url)
    assert (
        f"agent spec {agent_of(AGENT + bytes([10]))[0]}: blob {'0' * 12} is not in"
        in (verdict["error"])
    )
    assert spec_hash == damaged
