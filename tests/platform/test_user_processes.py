"""Processes that run user code: what they are told, and how they end."""

from __future__ import annotations

import subprocess
import sys

import psutil

from dsec.platform.user_environment import of_sessions, without_secrets

CHILD = (
    "from dsec.platform.parent import die_with_parent as d; d(); print(flush=True)\nwhile 1: pass"
)
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], "
PARENT += "stdout=subprocess.PIPE, start_new_session=True); p.stdout.readline(); "
PARENT += "print(p.pid, flush=True); p.wait()"


def test_what_opens_something_is_left_out() -> None:
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de", "PAGER": "less"}
    kept |= {"HOMEPAGE": "https://example.org/a@b", "OMP_NUM_THREADS": "1"}
    dropped = {
        "DSEC_DATABASE_URL": "x",
        "PGPASSWORD": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SESSION_TOKEN": "x",
        "OPENAI_API_KEY": "x",
        "HF_TOKEN": "x",
        "github_token": "x",
        "SSH_AUTH_SOCK": "x",
        "UPSTREAM": "amqp://me:hidden@host/",
        "CACHE": "redis://:hidden@host/0",
    }
    assert without_secrets({**kept, **dropped}) == kept


def test_sessions_run_alike_whatever_the_shell_says() -> None:
    told = {"PATH": "/bin", "PGPASSWORD": "x", "OMP_NUM_THREADS": "8", "TZ": "CET"}
    found = of_sessions(told | {"PYTHONHASHSEED": "random", "MKL_NUM_THREADS": "4"})
    assert "PGPASSWORD" not in found
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    assert [found[name] for name in threads] == ["1", "1", "1"]
    assert (found["PATH"], found["PYTHONHASHSEED"], found["TZ"]) == ("/bin", "0", "UTC")


def test_a_process_in_an_endless_loop_dies_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs([child], timeout=60)
    for process in alive:
        process.kill()
    assert gone
