"""What an agent is made with. The session's id is not in it: identity stays out of behaviour."""

from __future__ import annotations

import copy
from typing import Any

from dsec.session.adapters.gymnasium import GymnasiumAdapter
from dsec.session.curriculum import OPTION
from dsec.session.documents import AgentDocument
from dsec.session.io import SessionConfig
from dsec.session.seeds import derive


def agent_config(
    config: SessionConfig, document: AgentDocument, env: GymnasiumAdapter, anchor_id: str | None
) -> dict[str, Any]:
    """The mapping that an agent's class is called with. Runs user code: the environment's spaces.

    Args:
        anchor_id: of the anchor that the session comes back from.
    """
    stream = config.agent_stream
    told = {} if config.curriculum_level is None else {OPTION: config.curriculum_level}
    return told | {
        "params": copy.deepcopy(document.params),
        "observation_space": env.observation_space,
        "action_space": env.agent_action_space(derive(config.seed, "action_space", stream)),
        "tools": [tool.model_dump(mode="python") for tool in document.tools],
        "resource_profile": dict(document.resource_profile),
        "max_steps": config.max_steps,
        "seed": derive(config.seed, "agent", stream),
        "anchor_id": anchor_id,
    }
