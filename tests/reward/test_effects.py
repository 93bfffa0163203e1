"""What is away is waited for, for ever; what is absent is a fact after a while."""

from __future__ import annotations

import contextlib
import math
import shutil
import struct
from pathlib import Path

import psutil
import pytest
from tests.reward.conftest import ENV_SPEC, spec_of, step_fact

from dsec.platform import said
from dsec.platform.log import LogBehind, SpecContent
from dsec.platform.objects import BlobNotFound, ObjectStore, ObjectStoreError
from dsec.platform.said import LEFT_OUT, LINE_BYTES_MAX, PERIOD_BYTES_MAX
from dsec.platform.specs import BlobMissing, Patience, SpecMissing, spec_source
from dsec.platform.user_limits import UserLimits
from dsec.reward.effects import Lost, Specs, blob_source, resolved
from dsec.reward.frames import Failure, Task
from dsec.reward.isolation import FAULTS_MAX, Isolation, Untried
from dsec.session.observations import reference

ABSENT_S_MAX = 60.0
LIMITS = UserLimits(
    memory_bytes_max=1 << 30, open_files_max=64, file_bytes_max=1 << 20, processes_max=8
)
KEY = "0" * 64


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A log that stands at a floor and has some specs."""

    def __init__(self, floor: int, **specs: SpecContent) -> None:
        self.at = floor
        self.specs = specs

    async def spec(self, spec_hash: str) -> SpecContent | None:
        return self.specs.get(spec_hash)

    async def wait_floor(self, sequence: int, timeout_s: float, *, epoch: int | None) -> None:
        if self.at < sequence:
            raise LogBehind(f"the log has not come to {sequence}")


def specs_of(log: Log, clock: Clock, objects: ObjectStore | None = None) -> Specs:
    source = spec_source(log, objects, "reward", 0.0)  # type: ignore[arg-type]
    return Specs(source, patience=Patience(ABSENT_S_MAX, clock), kept_max=4)


async def test_a_spec_that_the_log_has_passed_is_absent_after_a_while() -> None:
    clock, log = Clock(), Log(7)
    specs = specs_of(log, clock)
    for clock.now in (0.0, ABSENT_S_MAX - 1):
        with pytest.raises(SpecMissing, match="has got to position 7"):
            await specs.get(ENV_SPEC[0], 7)
    clock.now = ABSENT_S_MAX
    error = (await specs.get(ENV_SPEC[0], 7)).error
    assert error is not None
    assert error.code == "spec_not_found"
    log.specs[ENV_SPEC[0]] = SpecContent(ENV_SPEC[0], "reward", ENV_SPEC[1], None)
    assert (await specs.get(ENV_SPEC[0], 7)).is_env, "what turns up after all is used"


async def test_a_log_that_is_behind_is_waited_for_for_ever() -> None:
    clock = Clock()
    specs = specs_of(Log(6), clock)
    for clock.now in (0.0, 100 * ABSENT_S_MAX):
        with pytest.raises(LogBehind):
            await specs.get("x", 7)


async def test_a_large_spec_whose_blob_is_not_in_the_store(tmp_path: Path) -> None:
    clock = Clock()
    specs = specs_of(
        Log(7, x=SpecContent("x", "reward", b"", KEY)), clock, ObjectStore(tmp_path.as_uri())
    )
    with pytest.raises(BlobMissing):
        await specs.get("x", 7)
    clock.now = ABSENT_S_MAX
    error = (await specs.get("x", 7)).error
    assert error is not None
    assert error.code == "blob_not_found"


def test_a_store_that_is_away_is_no_store_without_the_blob(tmp_path: Path) -> None:
    store = ObjectStore((tmp_path / "objects").as_uri())
    key = store.put(b"x")
    with pytest.raises(BlobNotFound):
        store.get(KEY)
    shutil.rmtree(tmp_path / "objects")
    with pytest.raises(ObjectStoreError) as caught:
        store.get(key)
    assert not isinstance(caught.value, BlobNotFound)


@pytest.mark.parametrize("configured", [True, False])
async def test_a_row_whose_observation_is_gone_has_no_reward(
    tmp_path: Path, configured: bool
) -> None:
    clock = Clock()
    store = ObjectStore(tmp_path.as_uri()) if configured else None
    get = blob_source(store, Patience(ABSENT_S_MAX, clock))
    recorded = reference(KEY, 9)
    with pytest.raises(BlobMissing):
        resolved(recorded, get)
    clock.now = ABSENT_S_MAX
    gone = resolved(recorded, get)
    assert type(gone) is Lost
    functions = Isolation(1.0, LIMITS)
    (outcome,) = await functions.score([Task("x", step_fact(), b"", gone)], {})
    assert isinstance(outcome, Failure)
    assert outcome.code == "blob_not_found"
    assert ("DSEC_OBJECT_STORE_URL" in outcome.message) is not configured


async def test_a_spec_that_rested_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes, good = (
        spec_of(f"import os\ndef score(t, services):\n    {body}\n")
        for body in ("os._exit(3)", "return 1.0")
    )
    contents = dict([crashes, good])
    functions = Isolation(5.0, LIMITS)
    tasks = [Task(s[0], step_fact(n=n), b"", b"") for n, s in enumerate([crashes] * 4 + [good])]
    try:
        *first, other = await functions.score(tasks, contents)
        assert sum(isinstance(o, Failure) for o in first) == FAULTS_MAX
        assert [type(o) for o in first].count(Untried) == 1
        assert type(other) is bytes
        assert [type(o) for o in await functions.score(tasks[3:4], contents)] == [Untried]
        monkeypatch.setattr("dsec.reward.isolation.FAULT_REST_S", 0.0)
        (late,) = await functions.score(tasks[3:4], contents)
        assert isinstance(late, Failure)
    finally:
        await functions.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("kept = []\n    while True: kept.append(open('/dev/null'))", "reward_raised"),
        (
            "import tempfile\n    with tempfile.TemporaryFile() as f:\n"
            "        while True: f.write(bytes(65536))",
            "reward_raised",
        ),
        ("import os\n    while True: os.fork()", "reward_crashed"),
    ],
)
async def test_a_function_that_goes_beyond_a_bound_fails_alone(body: str, code: str) -> None:
    greedy = spec_of(f"def score(t, services):\n    {body}\n")
    good = spec_of("def score(t, services):\n    return 1.0\n")
    functions = Isolation(20.0, LIMITS)
    order = [good, greedy, good]
    tasks = [Task(s[0], step_fact(n=n), b"", b"") for n, s in enumerate(order)]
    try:
        before, failed, after = await functions.score(tasks, dict([greedy, good]))
        assert isinstance(failed, Failure)
        assert failed.code == code
        assert type(before) is type(after) is bytes
    finally:
        await functions.close()


@pytest.mark.parametrize(
    "body",
    [
        # The copy comes back with a reward of its own, before the function does and after it.
        "pid = os.fork()\n    time.sleep(0.2 if pid else 0)\n    return 1.0 if pid else 666.0",
        "pid = os.fork()\n    time.sleep(0 if pid else 0.2)\n    return 1.0 if pid else 666.0",
        # As it is usually ended; here that is caught, as user code may not end the process.
        "if os.fork() == 0: sys.exit(0)\n    os.wait()\n    return 1.0",
    ],
)
async def test_a_copy_that_a_function_makes_answers_for_nobody(body: str) -> None:
    copies = spec_of(f"import os, sys, time\ndef score(t, services):\n    {body}\n")
    good = spec_of("def score(t, services):\n    return float(t.step)\n")
    functions = Isolation(20.0, LIMITS)
    try:
        for n in range(4):  # an answer too many would be the next question's
            tasks = [Task(spec[0], step_fact(n), b"", b"") for spec in (copies, good)]
            copied, scored = await functions.score(tasks, dict([copies, good]))
            assert [type(one) for one in (copied, scored)] == [bytes, bytes]
            assert [struct.unpack(">d", one[1:9])[0] for one in (copied, scored)] == [1.0, n]
    finally:
        await functions.close()


async def test_what_functions_print_is_bounded_and_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also over the deaths of its process, and where others print on that it has started."""
    monkeypatch.setenv("DSEC_SECRET_KEY", "hush-hush")
    monkeypatch.setattr(said, "PERIOD_S", math.inf)
    floods = spec_of(
        "import os, subprocess, sys\n"
        "def score(t, services):\n"
        "    parent = open(f'/proc/{os.getppid()}/environ').read()\n"
        "    print('found', 'hush-' + 'hush', 'KEY' in parent, flush=True)\n"
        "    os.write(2, b'x' * 500 + b'\\n')\n"
        "    subprocess.Popen(['yes', 'from-a-child'], start_new_session=True)\n"
        "    for n in range(3000): print('y' * 1000)\n"
        "    sys.stdout.flush()\n"
        "    os._exit(3)\n"
    )
    good = spec_of("def score(t, services):\n    print('well')\n    return 1.0\n")
    functions = Isolation(20.0, LIMITS)
    tasks = [Task(s[0], step_fact(n=n), b"", b"") for n, s in enumerate([floods, good])]
    try:
        failed, scored = await functions.score(tasks, dict([floods, good]))
        assert isinstance(failed, Failure)
        assert type(scored) is bytes
    finally:
        await functions.close()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == ["yes", "from-a-child"]:
                    process.kill()
    out, told = capfd.readouterr()
    assert out == ""
    assert "found ***" in told
    assert "hush" not in told
    assert LEFT_OUT.decode() in told
    assert len(told) < PERIOD_BYTES_MAX + 4 * LINE_BYTES_MAX


async def test_a_function_is_scored_with_the_threads_that_verification_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    asks = "sum(int(os.environ[n]) for n in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'))"
    spec = spec_of(f"import os\ndef score(t, services):\n    return float({asks})\n")
    functions = Isolation(20.0, LIMITS)
    try:
        (outcome,) = await functions.score([Task(spec[0], step_fact(), b"", b"")], dict([spec]))
    finally:
        await functions.close()
    assert type(outcome) is bytes
    assert struct.unpack(">d", outcome[1:9]) == (2.0,)
