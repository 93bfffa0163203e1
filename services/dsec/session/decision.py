"""What an agent's `step` returned: the action that the environment is given, and what is recorded
beside it."""

from __future__ import annotations

from typing import Any

from dsec.session.state_anchor import StateAnchor, state_anchor_of
from dsec.session.stops import Stop, encoded, is_dict, short

_KNOWN_KEYS = frozenset(
    ("action", "action_params", "provenance", "extras", "tool_calls", "state_anchor")
)

KEYS_TOLD_MAX = 5


def checked(decision: Any) -> tuple[Any, bytes, StateAnchor | None]:
    """What the environment is given, the canonical extras, and the anchor that is asked for.

    Raises:
        Stop: it is no decision.
        BaseException: what a mapping of the user's own class raises.
    """
    if type(decision) is not dict and is_dict(decision):
        decision = dict(decision)
    if type(decision) is not dict:
        raise Stop(
            "agent_invalid",
            f"step() must return a dict with `action`, not {short(decision)}",
        )
    if "action" not in decision:
        raise Stop(
            "agent_invalid", f"step() must return a dict with `action`, not {_keys(decision)}"
        )
    action = decision["action"]
    if len(decision) == 1:
        return action, b"", None
    for name in decision.keys() - _KNOWN_KEYS:
        raise Stop("agent_invalid", f"step() returned the key {short(name)}, which is not known")
    asked = decision.get("state_anchor")
    if asked is not None:
        asked = _anchor_of(asked)
    if decision.get("tool_calls"):
        raise Stop(
            "agent_invalid",
            "step() returned tool_calls, and the agent spec declares no `tools`",
        )
    if (params := decision.get("action_params")) is not None:
        action = {"action": action, "action_params": params}
    extras = {k: decision[k] for k in ("extras", "provenance") if decision.get(k) is not None}
    return action, encoded("agent_invalid", "the extras", extras) if extras else b"", asked


def _keys(decision: dict[Any, Any]) -> str:
    named = ", ".join(short(name) for name in list(decision)[:KEYS_TOLD_MAX])
    return f"one with {named} alone" if named else "an empty one"


def _anchor_of(given: Any) -> StateAnchor | None:
    try:
        return state_anchor_of(given)
    except ValueError as error:
        raise Stop("agent_invalid", f"state_anchor: {error}") from error
