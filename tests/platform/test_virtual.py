"""Hundreds of sessions in one process, each with time and chance of its own."""

import asyncio
import hashlib
import os
import pickle
import random
import secrets
import sys
import tempfile
import threading
import time
import types
import uuid

import numpy as np
import pytest
import torch

from dsec.platform import virtual
from dsec.platform.virtual_torch import torch_enter, torch_exit, uses_torch
from dsec.session import chance
from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace

ORIGINAL_TIME = time.time
STEPS = 4


@pytest.fixture
def virtual_process():
    was = virtual.installed()
    virtual.install()
    yield
    chance.deactivate()
    if not was:
        virtual.uninstall()


@pytest.fixture
def namespace():
    made = []

    def build(source):
        files = {"agent.py": source.encode()}
        made.append(CodeNamespace(hashlib.sha256(source.encode()).hexdigest(), files))
        return made[-1]

    yield build
    for one in made:
        one.unload()


def user_step(which: int) -> list:
    """Draws from everything, in an amount that differs between sessions."""
    drawn: list = [random.random(), random.choice("abcdef"), random.gauss(0, 1)]
    drawn += [random.Random().random(), random.SystemRandom().random(), secrets.token_hex(4)]
    drawn += np.random.rand(1 + which % 3).tolist()
    drawn += [np.random.randn(), np.random.choice(10), np.random.default_rng().random()]
    drawn += [np.random.RandomState().rand(), np.random.SeedSequence().entropy, np.random.ranf()]
    drawn += [time.time(), time.monotonic_ns(), time.perf_counter(), time.ctime(), time.localtime()]
    drawn += [time.strftime("%H:%M:%S"), time.process_time(), time.clock_gettime(0)]
    drawn += [str(uuid.uuid4()), str(uuid.uuid1()), os.urandom(3)]
    time.sleep(which)
    if which % 2:
        random.seed(which)
        np.random.seed(which)
    random.shuffle(items := list(range(9)))
    drawn += [items, torch.rand(2).tolist(), torch.randn(1 + which % 2).tolist()]
    return drawn


def run_step(one: Chance, position: int, which: int) -> list:
    one.position = position
    torch_enter(one)
    chance.activate(one)
    try:
        return user_step(which)
    finally:
        chance.deactivate()
        torch_exit(one)


def run_alone(which: int) -> list:
    one = Chance(which)
    return [run_step(one, step, which) for step in range(STEPS)]


@pytest.mark.usefixtures("virtual_process")
def test_interleaved_sessions_draw_what_they_draw_alone():
    sessions = [Chance(which) for which in range(200)]
    seen: list[list] = [[] for _ in sessions]
    order = random.Random(0)
    for step in range(STEPS):
        for which in order.sample(range(200), 200):
            seen[which].append(run_step(sessions[which], step, which))
            random.random(), np.random.rand(), torch.rand(1)  # the process's own draws between
    assert seen == [run_alone(which) for which in range(200)]
    assert seen[0] != seen[2]
    kinds = {"random", "numpy", "time", "uuid", "urandom", "torch"}
    assert all(one.used == kinds for one in sessions)


@pytest.mark.usefixtures("virtual_process")
def test_a_session_restored_half_way_ends_as_undisturbed():
    for which in range(5):
        one = Chance(which)
        for step in range(2):
            run_step(one, step, which)
        saved = pickle.loads(pickle.dumps(one.get_state()))
        run_step(one, 2, which)
        other = Chance(99)
        other.set_state(saved)
        assert [run_step(other, step, which) for step in (2, 3)] == run_alone(which)[2:]


@pytest.mark.usefixtures("virtual_process")
def test_snapshots_while_torch_is_swapped_in():
    one = Chance(1)
    torch_enter(one)
    torch.rand(3)
    saved = one.get_state()
    expected = torch.rand(3).tolist()
    one.set_state(saved)
    assert torch.rand(3).tolist() == expected
    torch_exit(one)


def test_torch_gives_the_process_its_own_state_back():
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    got = torch.rand(1).tolist()
    one, two = Chance(1), Chance(2)
    torch_enter(one)
    first = torch.rand(1).tolist()
    torch_enter(two)  # straight from one to the other
    assert torch.rand(1).tolist() != first
    torch_exit(one)  # not in any more: nothing happens
    torch_exit(two)
    torch_exit(two)
    got += torch.rand(3).tolist()
    assert got == expected
    torch_enter(one)
    first += torch.rand(1).tolist()
    torch_exit(one)
    alone = Chance(1)
    torch_enter(alone)
    assert first == torch.rand(2).tolist()
    torch_exit(alone)


def test_the_originals_come_back():
    was = virtual.installed()
    virtual.uninstall()
    names = [(m, n, v) for m in (time, os, uuid, random, np.random) for n, v in vars(m).items()]
    names += [(random.Random, "seed", random.Random.seed)]
    mtrand = sys.modules["numpy.random.mtrand"]
    names += [(mtrand, n, v) for n, v in vars(mtrand).items()]
    virtual.install()
    assert time.time is not ORIGINAL_TIME
    redirected = time.time
    virtual.install()
    assert time.time is redirected
    changed = {n for m, n, v in names if getattr(m, n) is not v}
    assert {"time", "sleep", "urandom", "uuid4", "_inst", "rand", "_rand", "seed"} <= changed
    virtual.uninstall()
    assert all(getattr(m, n) is v for m, n, v in names)
    if was:
        virtual.install()


@pytest.mark.usefixtures("virtual_process")
def test_outside_a_session_everything_is_the_process_s_own():
    random.seed(5)
    np.random.seed(5)
    got = [random.random(), np.random.rand(), np.random.ranf()]
    state = random.getstate(), np.random.get_state(legacy=False)
    assert got == [random.Random(5).random(), *np.random.RandomState(5).rand(2)]
    again = [random.random(), np.random.rand()]
    random.setstate(state[0])
    np.random.set_state(state[1])
    assert [random.random(), np.random.rand()] == again
    assert abs(time.time() - ORIGINAL_TIME()) < 60
    assert uuid.uuid4() != uuid.uuid4()
    assert random.Random().random() != random.Random().random()
    assert np.random.default_rng().random() != np.random.default_rng().random()


@pytest.mark.usefixtures("virtual_process")
def test_numpy_s_bit_generator_is_replaced_outside_and_refused_inside():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        expected = np.random.Generator(np.random.PCG64(1)).random()
        assert np.random.random_sample() == expected
        chance.activate(Chance(1))
        with pytest.raises(RuntimeError, match="bit generator"):
            np.random.set_bit_generator(np.random.PCG64(1))
    finally:
        chance.deactivate()
        np.random.set_bit_generator(before)


@pytest.mark.usefixtures("virtual_process")
def test_sleep_does_not_block():
    chance.activate(Chance(1))
    started = time.time()
    real = ORIGINAL_TIME()
    time.sleep(3600)
    assert time.time() - started >= 3600
    assert ORIGINAL_TIME() - real < 60


@pytest.mark.usefixtures("virtual_process")
def test_a_busy_wait_ends():
    chance.activate(Chance(1))
    deadline = time.monotonic() + 0.01
    while time.monotonic() < deadline:
        pass


@pytest.mark.usefixtures("virtual_process")
def test_other_threads_keep_the_real_clock():
    one = Chance(1)
    chance.activate(one)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(time.time()))
    thread.start()
    thread.join()
    chance.deactivate()
    assert abs(seen[0] - ORIGINAL_TIME()) < 60
    assert "time" not in one.used


def test_asyncio_runs_across_install_and_uninstall():
    was = virtual.installed()
    virtual.uninstall()

    async def main():
        loop = asyncio.get_running_loop()
        before = loop.time()
        waiting = asyncio.create_task(asyncio.sleep(0.05, "slept"))
        virtual.install()
        assert 0 <= loop.time() - before < 10
        chance.activate(Chance(1))
        time.sleep(1000)  # noqa: ASYNC251 - the session's clock, which does not wait
        chance.deactivate()
        assert await waiting == "slept"
        virtual.uninstall()
        await asyncio.sleep(0.01)
        assert 0.05 <= loop.time() - before < 10

    asyncio.run(main())
    if was:
        virtual.install()


@pytest.mark.usefixtures("virtual_process")
def test_replacements_behave_like_built_ins():
    class Holder:
        clock = time.time
        draw = random.random
        rand = np.random.rand

    assert Holder().clock() > 0
    assert 0 <= Holder().draw() < 1
    assert 0 <= Holder().rand() < 1
    assert pickle.loads(pickle.dumps(time.time)) is time.time
    assert time.time.__name__ == "time"
    assert isinstance(sys.modules["numpy.random.mtrand"]._rand, np.random.RandomState)


@pytest.mark.usefixtures("virtual_process")
def test_temporary_names_do_not_advance_a_session():
    one = Chance(1)
    chance.activate(one)
    with tempfile.TemporaryDirectory():
        pass
    chance.deactivate()
    assert "urandom" not in one.used


@pytest.mark.usefixtures("virtual_process")
def test_captured_originals_are_named(namespace, monkeypatch):
    library = types.ModuleType("captured_early")
    library.now = ORIGINAL_TIME
    library.later = time.time
    monkeypatch.setitem(sys.modules, "captured_early", library)
    code = namespace("import captured_early\nA = 1")
    code.load("agent.py:A")
    assert virtual.undeclared_uses(code) == {"captured_early.now"}
    clean = namespace("import math\nA = 1")
    clean.load("agent.py:A")
    assert virtual.undeclared_uses(clean) == set()


def test_torch_is_found_directly_and_behind_a_library(namespace, monkeypatch):
    library = types.ModuleType("learns")
    library.nn = torch.nn
    monkeypatch.setitem(sys.modules, "learns", library)
    for source, expected in [
        ("import torch\nA = 1", True),
        ("import learns\nA = 1", True),
        ("import math\nA = 1", False),
        ("import numpy, random\nA = 1", False),
    ]:
        code = namespace(source)
        code.load("agent.py:A")
        assert uses_torch(code) is expected, source


@pytest.mark.usefixtures("virtual_process")
def test_shipped_code_draws_from_its_session(namespace):
    code = namespace(
        "from random import random\nfrom time import time\nfrom numpy.random import rand\n"
        "AT_IMPORT = [random(), time(), rand()]\n"
        "def run():\n    return [random(), time(), rand()]\n"
    )
    run = code.load("agent.py:run")
    seen = []
    for _ in range(2):
        chance.activate(Chance(1))
        seen.append(run())
        chance.deactivate()
    assert seen[0] == seen[1]
    at_import = code.load("agent.py:AT_IMPORT")
    code.unload()
    again = CodeNamespace(code._shipped.spec_hash, code._shipped.files)
    assert again.load("agent.py:AT_IMPORT") == at_import
