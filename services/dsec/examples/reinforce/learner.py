"""The learner: turns whole episodes into better weights. Knows torch, not DSec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

DISCOUNT = 0.99
EPOCHS = 6
CLIP = 0.2
LEARNING_RATE = 1e-2


class Rollout(Protocol):
    """What the learner needs of an episode of T steps."""

    @property
    def observations(self) -> Any:
        """float32 [T + 1, 4]"""

    @property
    def actions(self) -> Any:
        """int64 [T]"""

    @property
    def rewards(self) -> Any:
        """float64 [T]"""


def returns_to_go(rewards: np.ndarray) -> np.ndarray:
    """Discounted sums of what is still to come, [T] to [T]."""
    result = np.zeros(len(rewards))
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = float(rewards[t]) + DISCOUNT * running
        result[t] = running
    return result


class Learner:
    """REINFORCE with normalised returns, several clipped epochs a batch."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """One update from a batch of whole episodes."""
        observations = torch.as_tensor(
            np.concatenate([r.observations[: len(r.actions)] for r in rollouts])
        ).float()
        actions = torch.as_tensor(np.concatenate([r.actions for r in rollouts])).long()
        returns = torch.as_tensor(
            np.concatenate([returns_to_go(r.rewards) for r in rollouts])
        ).float()
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        with torch.no_grad():
            before = self._log_probs(observations, actions)
        for _ in range(EPOCHS):
            ratio = (self._log_probs(observations, actions) - before).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def _log_probs(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        logits = self.network(observations).log_softmax(-1)
        chosen: torch.Tensor = logits.gather(1, actions[:, None])[:, 0]
        return chosen
