"""The shop of one customer segment: each step is an hour and a customer who may get coupons."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

HOURS = 24
COUPONS = 3
FORBIDDEN = {0b011, 0b111}
"""Combinations that the promotion rules exclude: percent off together with money off."""
GOOD_SHARE = 0.8


class Shop(gymnasium.Env):
    """Observation: hour, loyalty, basket, all within 0 to 1. Action: which coupons, as bits."""

    def __init__(self, segments: int = 287) -> None:
        self.segments = segments
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2**COUPONS)
        self.hour = 0
        self.segment = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A day begins."""
        super().reset(seed=seed)
        self.hour = 0
        self.segment = int(self.np_random.integers(self.segments))
        self._next_customer()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Give the customer these coupons. What that is worth the services know, not the shop."""
        coupons = 0 if int(action) in FORBIDDEN else int(action)
        info = {
            "segment": self.segment,
            "hour": self.hour,
            "coupons": coupons,
            "basket": self.basket,
            "loyalty": self.loyalty,
            "good": self.good,
        }
        self.hour += 1
        done = self.hour >= HOURS
        self._next_customer()
        return self._observation(), 0.0, done, False, info

    def _next_customer(self) -> None:
        self.loyalty, self.basket, luck = (float(x) for x in self.np_random.random(3))
        self.good = luck < GOOD_SHARE

    def _observation(self) -> Any:
        return np.array([self.hour / HOURS, self.loyalty, self.basket], np.float32)
