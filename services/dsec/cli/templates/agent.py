"""An agent that learns as it goes: hill climbing over four weights, one trial an episode."""

from typing import Any

import numpy as np


class Climber:
    """Pushes the cart where the weighted observation says; keeps the weights that did best."""

    def __init__(self, session_config: dict[str, Any]) -> None:
        self.noise = float(session_config["params"]["noise"])
        # The seed is derived from the session's: draw from a generator of your own.
        self.random = np.random.default_rng(session_config["seed"])
        # Position, speed, angle, angular speed: begin with a push to where the pole leans.
        self.best = self.trial = np.array([0.0, 0.0, 1.0, 0.0])
        self.best_total = self.total = 0.0

    def on_episode_start(self, episode: int) -> None:
        if self.total >= self.best_total:
            self.best, self.best_total = self.trial, self.total
        self.trial = self.best + self.noise * self.random.normal(size=4)
        self.total = 0.0

    def step(self, observation: Any) -> dict[str, Any]:
        score = float(observation @ self.trial)
        return {"action": int(score > 0), "extras": {"score": score}}

    def on_reward(self, reward: float, done: bool, info: dict[str, Any]) -> None:
        self.total += reward
