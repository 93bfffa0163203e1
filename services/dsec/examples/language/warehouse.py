"""The environment, and the tool that knows what it asks for."""

from typing import Any

import gymnasium

STOCK = {"red lamps": 12, "blue chairs": 7, "green tables": 31, "white shelves": 0}


def stock(item: str) -> dict[str, Any]:
    """How many of an item there are."""
    return {"item": item, "count": STOCK.get(item)}


class Warehouse(gymnasium.Env[str, str]):
    """Asks for one stock an episode; the reward is 1 for the right number."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Text(200)
        self.action_space = gymnasium.spaces.Text(200, min_length=0)
        self.item = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.item = sorted(STOCK)[int(self.np_random.integers(len(STOCK)))]
        return f"How many {self.item} are in stock?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == str(STOCK[self.item])
        return "", float(right), True, False, {}
