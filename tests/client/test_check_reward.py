"""A reward function that keeps state is refused at the desk of the one who wrote it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.client.check_reward import REWARD_STEPS, check_reward
from dsec.client.sealing import SealedSpec
from dsec.client.specs import read_spec
from dsec.client.yaml_file import SpecFileError

ENV = {"entry": "gymnasium:CartPole-v1", "code": []}


def reward(tmp_path: Path, body: str) -> SealedSpec:
    (tmp_path / "reward.py").write_text(f"import dsec\n{body}")
    return read_spec("reward", f"{tmp_path}/reward.py:score")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "calls = 0\n@dsec.reward()\ndef score(t, services):\n"
            "    global calls\n    calls += 1\n    return calls\n",
            "global calls",
        ),
        (
            "@dsec.reward()\ndef score(t, services, first={}):\n"
            "    return first.setdefault('x', float(t.next_observation[0]))\n",
            "default 0 of score",
        ),
        (
            "n = [0]\n@dsec.reward()\ndef score(t, services):\n"
            "    n[0] += 1\n    assert n[0] != 3\n    return 1\n",
            "global n",
        ),
    ],
)
def test_state_is_found_and_named(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(SpecFileError, match="keeps state between calls") as caught:
        check_reward(reward(tmp_path, body), read_spec("env", ENV))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("body", "compared"),
    [
        ("@dsec.reward()\ndef score(t, services):\n    return t.env_reward\n", REWARD_STEPS),
        (
            "known = {}\n@dsec.reward()\ndef score(t, services):\n"
            "    return known.setdefault(t.step, t.step)\n",
            REWARD_STEPS,
        ),
        (
            "@dsec.reward(services=['a'])\nasync def score(t, services):\n"
            "    return (await services['a'].get('/')).status if t.step % 2 else 1\n",
            REWARD_STEPS // 2,
        ),
        ("@dsec.reward()\ndef score(t, services):\n    raise ValueError\n", REWARD_STEPS),
    ],
)
def test_what_keeps_none_passes(tmp_path: Path, body: str, compared: int) -> None:
    assert check_reward(reward(tmp_path, body), read_spec("env", ENV)) == compared


def test_the_environments_own_reward_needs_no_check() -> None:
    assert check_reward(read_spec("reward", "env"), read_spec("env", ENV)) == 0


def test_whole_episodes_are_tried_at_several_lengths(tmp_path: Path) -> None:
    env = read_spec("env", ENV)
    whole = "@dsec.reward(per='episode')\ndef score(episode, services):\n"
    assert check_reward(reward(tmp_path, whole + "    return len(episode)\n"), env) >= 4
    counting = "seen = []\n" + whole + "    seen.append(len(episode))\n    return len(seen)\n"
    with pytest.raises(SpecFileError, match=r"keeps state between calls: episode \d+ of"):
        check_reward(reward(tmp_path, counting), env)


CHECKED_IN_ITS_OWN = """
import pathlib, sys
from dsec.client.check_reward import check_reward
from dsec.client.specs import read_spec
folder = pathlib.Path(sys.argv[1])
reward = read_spec("reward", f"{folder}/r.py:score")
env = read_spec("env", {"entry": "gymnasium:CartPole-v1", "code": []})
print("checked", check_reward(reward, env))
"""


def test_a_copy_that_a_function_makes_does_not_go_on_behind_the_check(tmp_path: Path) -> None:
    """It would request the sessions once more."""
    (tmp_path / "r.py").write_text(
        "import dsec, os, sys\n"
        "if (pid := os.fork()) == 0: sys.exit(0)\nos.waitpid(pid, 0)\n"
        "@dsec.reward()\ndef score(t, services):\n"
        "    if os.environ.pop('FORKS', '') and (pid := os.fork()): os.waitpid(pid, 0)\n"
        "    return 1.0\n"
    )
    command = [sys.executable, "-c", CHECKED_IN_ITS_OWN, str(tmp_path)]
    told = subprocess.run(
        command,
        env=os.environ | {"FORKS": "1"},  # once: copies that went on would make copies
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.split("\n") == [f"checked {REWARD_STEPS}", ""], told.stderr
