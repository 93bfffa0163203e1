"""The example that trains: to its mean return, with a learning curve that SQL alone gives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from dsec.client.client import Client

pytest.importorskip("torch")
pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

SOLVED, BATCH = 195.0, 32


async def test_it_comes_to_its_mean_return_and_its_curve_is_in_the_log(
    stack: Any, client: Client
) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "dsec.examples.reinforce", "--experiment", "tried", "--json"],
        env={**os.environ, "DSEC_STATE_DIR": str(stack.state_dir)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    printed = [float(mean) for mean in re.findall(r"mean return +([0-9.]+)", done.stderr)]
    curve = [round(row["mean_return"], 1) for row in told["curve"]]
    assert curve == printed, "what SQL says is what the trainer saw"
    assert {row["episodes"] for row in told["curve"]} == {BATCH}
    assert curve[-1] >= SOLVED > max(curve[:-1])
    assert curve[0] < SOLVED / 4, "it began without knowing anything"
    # Each iteration's sessions were driven by the weights that were published for it.
    rows = stack.sql(
        "select labels ->> 'iteration' as iteration, count(distinct policy) as versions, "
        "min(policy) as version from session_summary where labels ->> 'experiment' = 'tried' "
        "group by 1"
    )
    assert {row["versions"] for row in rows} == {1}
    assert len({row["version"] for row in rows}) == len(curve)
