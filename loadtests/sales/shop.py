"""The shop of one customer segment: each step is an hour and a customer who may get coupons.

An episode is a shift of six hours. At a lower curriculum level there are fewer coupons to choose
from: what an agent learns from rewards that lag should not be the hardest part.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

HOURS = 24
SHIFT_HOURS = 6
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
        self.segment = -1
        self.allowed = COUPONS

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A shift begins: the first of a day, or the next."""
        super().reset(seed=seed)
        if self.segment < 0:
            self.segment = int(self.np_random.integers(self.segments))
        level = (options or {}).get("curriculum_level")
        self.allowed = COUPONS if level is None else min(COUPONS, 1 + int(level))
        self._next_customer()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Give the customer these coupons. What that is worth the services know, not the shop."""
        coupons = int(action) & ((1 << self.allowed) - 1)
        if coupons in FORBIDDEN:
            coupons = 0
        info = {
            "segment": self.segment,
            "hour": self.hour,
            "coupons": coupons,
            "basket": self.basket,
            "loyalty": self.loyalty,
            "good": self.good,
        }
        self.hour = (self.hour + 1) % HOURS
        done = self.hour % SHIFT_HOURS == 0
        self._next_customer()
        return self._observation(), 0.0, done, False, info

    def _next_customer(self) -> None:
        self.loyalty, self.basket, luck = (float(x) for x in self.np_random.random(3))
        self.good = luck < GOOD_SHARE

    def _observation(self) -> Any:
        return np.array([self.hour / HOURS, self.loyalty, self.basket], np.float32)
