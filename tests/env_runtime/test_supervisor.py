"""What a worker's death is taken for."""

import signal
from uuid import UUID

import pytest

from dsec.env_runtime.running import EXIT_OUT_OF_MEMORY, Running
from dsec.env_runtime.supervisor import judge
from dsec.env_runtime.worker import EXIT_FENCED

SESSION = UUID("0192f0c1-2345-7abc-8def-0123456789ab")
RUNNING = Running(SESSION, 5, 0, 30.0)


@pytest.mark.parametrize(
    ("code", "running", "killed_for", "oom", "reason"),
    [
        (3, RUNNING, None, False, "exit"),
        (0, RUNNING, None, False, "exit"),  # os._exit(0) in user code is no good order
        (-signal.SIGSEGV, RUNNING, None, False, "signal"),
        (-signal.SIGKILL, RUNNING, "step_deadline", False, "step_deadline"),
        (-signal.SIGKILL, RUNNING, "oom", False, "oom"),
        (EXIT_OUT_OF_MEMORY, RUNNING, None, True, "oom"),
        (0, None, None, False, "drained"),
        (-signal.SIGKILL, None, None, False, "signal"),
    ],
)
def test_reasons(
    code: int, running: Running | None, killed_for: str | None, oom: bool, reason: str
) -> None:
    death = judge(code, running, killed_for, out_of_memory=oom)  # type: ignore[arg-type]
    assert death is not None
    assert death.reason == reason
    if running is None:
        assert death.culprit is None
    else:
        assert death.culprit is not None
        assert (death.culprit.session_id, death.culprit.step) == (SESSION, 5)


def test_a_fenced_worker_is_no_news() -> None:
    assert judge(EXIT_FENCED, None, None, out_of_memory=False) is None
