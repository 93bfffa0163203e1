"""An agent that learns which coupons pay, by loyalty: epsilon-greedy over running means."""

from __future__ import annotations

from typing import Any

import numpy as np

BUCKETS = 4
EPSILON = 0.2


class Seller:
    """One segment's agent. Late rewards find the decision that they are for by its step."""

    def __init__(self, session_config: dict[str, Any]) -> None:
        actions = int(session_config["action_space"].n)
        self.random = np.random.default_rng(session_config["seed"])
        self.totals = np.zeros((BUCKETS, actions))
        self.counts = np.zeros((BUCKETS, actions))
        self.taken: dict[int, tuple[int, int]] = {}
        self.steps = 0

    def step(self, observation: Any) -> dict[str, Any]:
        """Coupons for the customer at hand."""
        bucket = min(int(observation[1] * BUCKETS), BUCKETS - 1)
        if self.random.random() < EPSILON:
            action = int(self.random.integers(self.totals.shape[1]))
        else:
            means = self.totals[bucket] / np.maximum(self.counts[bucket], 1)
            action = int(np.argmax(means))
        self.taken[self.steps] = bucket, action
        self.steps += 1
        return {"action": action}

    def on_reward(self, reward: float, done: bool, info: dict[str, Any]) -> None:
        """Learn what a decision was worth."""
        place = self.taken.pop(info["dsec"]["step"])
        self.totals[place] += reward
        self.counts[place] += 1

    def on_reward_missing(self, step: int, code: str) -> None:
        """Nothing is learnt from a decision whose reward will not come."""
        self.taken.pop(step, None)
