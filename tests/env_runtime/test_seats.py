"""Opening a session: handed back while something is away, ended where it can never start."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.env_runtime.conftest import AGENT, REWARD_SPEC, Code, World, code_of, request_of

from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.env_runtime import library
from dsec.env_runtime.library import Library, Tail
from dsec.env_runtime.running import RunningSlot
from dsec.platform import virtual
from dsec.platform.log import LogReader, SpecContent
from dsec.platform.objects import ObjectStore
from dsec.platform.stack.ports import free_port
from dsec.session.documents import RewardDocument, seal, unseal
from dsec.session.program import load_program
from dsec_contracts import (
    PolicyPublished,
    SessionEnded,
    SessionRequested,
    SessionStarted,
    SpecRegistered,
)
from dsec_contracts.spec import PolicyFact, SpecFact

ORIGINAL_TIME = time.time

pytestmark = [pytest.mark.nats, pytest.mark.postgres]


@pytest.fixture
def virtual_process() -> Iterator[None]:
    """The process's clocks and chance redirected, as in a worker."""
    virtual.install()
    yield
    virtual.uninstall()


def forget(code: Code) -> None:
    """A worker is a new process, where nothing is loaded yet."""
    for namespace in load_program(*code.agent, *code.env).namespaces:
        namespace.unload()


async def test_a_placement_while_the_database_is_away_is_handed_back(world: World) -> None:
    await world.worker(database_url=f"postgresql://127.0.0.1:{free_port()}/nobody")
    request = await world.run_session()
    released = await world.released(request.session_id)
    assert "database cannot be asked" in released.circumstance.reason
    assert not world.events(SessionEnded, request.session_id)


async def test_a_restart_while_the_recorder_is_behind_is_handed_back(world: World) -> None:
    await world.worker(restart_wait_s=0.3)
    code = code_of()
    request = request_of(code)
    await world.place(request, attempt=2)
    released = await world.released(request.session_id)
    assert released.fact.attempt == 2
    assert "the log has not come to" in released.circumstance.reason
    assert not world.events(SessionEnded, request.session_id)


async def test_a_first_attempt_waits_for_its_specs_and_is_handed_back_without_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "SPEC_WAIT_S", 0.3)
    await world.worker()
    request = await world.run_session()  # nothing is recorded
    released = await world.released(request.session_id)
    assert "Is the recorder running?" in released.circumstance.reason


async def test_a_spec_that_the_log_has_passed_without_having_it_ends_the_session(
    world: World,
) -> None:
    world.record()
    await world.worker()
    request = request_of(code_of())  # nobody registered it
    await world.place(request)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "spec_not_found")
    assert ended.fact.steps == 0


async def test_code_that_does_not_load_ends_with_its_code(world: World) -> None:
    world.record()
    await world.worker()
    request = await world.run_session(code_of(agent="import no_such_module_anywhere\n"))
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "agent_load_failed")
    assert "no_such_module_anywhere" in ended.circumstance.message


@pytest.mark.parametrize("path", ["/etc/agent.py", "../agent.py", "x/../agent.py", "a\0.py"])
@pytest.mark.parametrize("kind", ["agent", "env"])
async def test_a_spec_whose_files_have_impossible_names_ends_its_session_and_not_the_worker(
    world: World, kind: str, path: str
) -> None:
    world.record()
    world.answering = True
    await world.worker()
    neighbour = await world.run_session(max_steps=200)
    good = code_of()
    document, files = unseal(good.agent[1] if kind == "agent" else good.env[1], kind)
    bad = seal(kind, document, files | {path: b""})
    request = await world.run_session(good._replace(**{kind: bad}))
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", f"{kind}_load_failed")
    assert "not a relative path" in ended.circumstance.message
    assert (await world.ended(neighbour.session_id)).fact.code == "max_steps"


async def test_weights_that_cannot_be_decoded_end_their_session_and_not_the_worker(
    world: World, object_store_url: str
) -> None:
    world.record()
    world.answering = True
    await world.worker(object_store_url=object_store_url)
    blob = ObjectStore(object_store_url).put(b"\xff what another language wrote")
    fact = PolicyFact(name="p", version="1", content_hash=blob, blob=blob, size_bytes=1)
    await world.publish(PolicyPublished(fact=fact), "p-1")
    request = await world.run_session(policy="p@1")
    named = request.session_id
    await world.publish(SessionRequested(fact=request), named, session_id=named)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "policy_invalid")
    assert "policy p@1 is not canonical" in ended.circumstance.message
    async with Client(
        nats_url=world.url, database_url=world.database_url, object_store_url=object_store_url
    ) as client:
        reader = await client.log()
        await reader.wait_floor((await world.bus.stream_state()).last_sequence, 10)
        [verdict] = await verify_sessions(client, [named])
    assert verdict["ok"], verdict
    neighbour = await world.run_session()
    assert (await world.ended(neighbour.session_id)).fact.code == "max_steps"


async def test_the_end_of_code_that_loads_no_longer_closes_the_log_of_earlier_attempts(
    world: World, tmp_path: Path
) -> None:
    world.record()
    absent = tmp_path / "absent"
    code = code_of(agent=f"import os\nassert not os.path.exists({str(absent)!r})\n" + AGENT)
    run = await world.worker()
    request = await world.run_session(code, max_steps=50)
    [first] = await world.stepped(request.session_id, 1)
    await world.reward(first)
    last = (await world.stepped(request.session_id, 2))[1]
    await run.close()
    del world.runs["w1"]

    forget(code)
    absent.touch()
    await world.worker("w2")
    await world.place(request, "w2", 2, previous_lane="w1-0")
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("agent_load_failed", last.step + 1)
    absent.unlink()
    verdict = await world.verdict(request)
    assert verdict.first_divergence is None
    assert (verdict.complete, verdict.steps) == (True, 2)


async def test_what_is_known_of_reward_specs_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "REWARD_SPECS_MAX", 2)
    world.record()
    specs = [REWARD_SPEC]
    specs += [seal("reward", RewardDocument(weights={"a": float(n)}), {}) for n in range(3)]
    for spec_hash, content in specs:
        fact = SpecFact(spec_hash=spec_hash, kind="reward", content=content)
        at = await world.publish(SpecRegistered(fact=fact), spec_hash)
    reader = await LogReader.connect(world.database_url)
    slot = RunningSlot(world.folder / "slot", 1, create=True)
    kept = Library(reader, None, slot)
    for spec_hash, _ in specs:
        assert not (await kept.rewarding(spec_hash, Tail(at, None))).wants_prior
    assert list(kept._rewarding) == [spec_hash for spec_hash, _ in specs[-2:]]
    await reader.close()


class CountingReader(LogReader):
    """Counts what it is asked for."""

    looked = 0

    async def spec(self, spec_hash: str) -> SpecContent | None:
        """See `LogReader`."""
        self.looked += 1
        return await super().spec(spec_hash)


@pytest.fixture
async def counting(world: World) -> AsyncIterator[CountingReader]:
    """A reader of the world's log."""
    reader = await CountingReader.connect(world.database_url)
    yield reader
    await reader.close()


async def test_many_starts_read_what_they_share_once(
    world: World, counting: CountingReader
) -> None:
    world.record()
    code = code_of()
    await world.register(code)
    at = (await world.bus.stream_state()).last_sequence
    slot = RunningSlot(world.folder / "slot", 1, create=True)
    kept, request = Library(counting, None, slot), request_of(code)
    await counting.wait_floor(at, 15)
    found = await asyncio.gather(*(kept.program(request, 0, Tail(at, None)) for _ in range(20)))
    assert len({id(one) for one in found}) == 1
    assert counting.looked == 2, "an agent and an environment"
    hashes = [REWARD_SPEC[0]] * 20
    await asyncio.gather(*(kept.rewarding(one, Tail(at, None)) for one in hashes))
    assert counting.looked == 3


async def test_where_the_first_finds_nothing_each_looks_for_itself(
    world: World, counting: CountingReader
) -> None:
    slot = RunningSlot(world.folder / "slot", 1, create=True)
    kept, request = Library(counting, None, slot), request_of(code_of())  # nobody registered it
    starts = (kept.program(request, 0, Tail(0, None)) for _ in range(5))
    found = await asyncio.gather(*starts, return_exceptions=True)
    assert [getattr(one, "code", one) for one in found] == ["spec_not_found"] * 5
    world.record()
    await world.register(code_of())
    at = (await world.bus.stream_state()).last_sequence
    assert (await kept.program(request, 0, Tail(at, None))).program.determinism == "D2"


async def register_with_blob(world: World, code: Code, blob: str = "0" * 64) -> None:
    """Register a program whose agent lies in the object store."""
    specs = {"agent": code.agent, "env": code.env, "reward": REWARD_SPEC}
    for kind, (spec_hash, content) in specs.items():
        where = {"blob": blob} if kind == "agent" else {"content": content}
        fact = SpecFact.model_validate({"spec_hash": spec_hash, "kind": kind} | where)
        await world.publish(SpecRegistered(fact=fact), spec_hash)


async def test_a_blob_that_is_not_there_ends_the_session(world: World, tmp_path: Path) -> None:
    world.record()
    await world.worker(object_store_url=tmp_path.as_uri())
    code = code_of()
    await register_with_blob(world, code)
    request = request_of(code)
    await world.place(request)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "spec_not_found")


async def test_a_blob_that_is_another_than_the_hash_names_is_not_run(
    world: World, tmp_path: Path
) -> None:
    world.record()
    await world.worker(object_store_url=tmp_path.as_uri())
    code = code_of()
    other = code_of(agent=AGENT + "\n# changed\n")
    blob = ObjectStore(tmp_path.as_uri()).put(other.agent[1])
    await register_with_blob(world, code, blob)
    request = request_of(code)
    await world.place(request)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "spec_not_found")
    assert "another hash" in ended.circumstance.message


async def test_an_object_store_that_is_away_hands_the_session_back(
    world: World, tmp_path: Path
) -> None:
    world.record()
    await world.worker(object_store_url=(tmp_path / "unmounted").as_uri())
    code = code_of()
    await register_with_blob(world, code)
    request = request_of(code)
    await world.place(request)
    assert (await world.released(request.session_id)).circumstance.reason
    assert not world.events(SessionEnded, request.session_id)


@pytest.mark.usefixtures("virtual_process")
async def test_a_start_names_the_clocks_that_a_package_captured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType("captured_early")
    library.now = ORIGINAL_TIME  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "captured_early", library)
    world.record()
    await world.worker()
    request = await world.run_session(code_of(agent="import captured_early\n" + AGENT))
    [started] = await world.until(lambda: world.events(SessionStarted, request.session_id))
    assert started.circumstance.fingerprint["undeclared_uses"] == "captured_early.now"
