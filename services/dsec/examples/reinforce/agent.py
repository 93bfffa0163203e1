"""The agent that runs inside the sessions. It needs torch and nothing of ours."""

from typing import Any

import torch
from torch import nn


def make_network(hidden: int) -> nn.Module:
    """Logits of two actions, from CartPole's four numbers."""
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


class Reinforce:
    """Samples actions from the policy it was given. The weights are pinned for a session."""

    def __init__(self, session_config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.network = make_network(session_config["params"]["hidden"])
        self.generator = torch.Generator().manual_seed(session_config["seed"])

    def on_policy(self, version: str, state: dict[str, torch.Tensor]) -> None:
        self.network.load_state_dict(state)

    @torch.no_grad()
    def step(self, observation: Any) -> dict[str, Any]:
        logits = self.network(torch.as_tensor(observation))
        action = torch.multinomial(logits.softmax(-1), 1, generator=self.generator).item()
        return {"action": action, "extras": {"log_prob": logits.log_softmax(-1)[action].item()}}
