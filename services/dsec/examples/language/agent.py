"""A language agent: model, tool calls, model, action. It needs nothing of ours.

Every call, of the model too, is a tool turn: the environment stands still until the results are in,
and a session that is executed again hears what was recorded instead of asking again.
"""

import json
from typing import Any

MODEL = "model"


class Storekeeper:
    """Answers questions in words, with the tools that its model asks for."""

    def __init__(self, session_config: dict[str, Any]) -> None:
        self.system = session_config["params"]["system"]
        self.tools = [
            {
                "type": "function",
                "function": {k: t[k] for k in ("name", "description", "parameters")},
            }
            for t in session_config["tools"]
            if t["name"] != MODEL
        ]
        self.begin(None)

    def begin(self, question: Any) -> None:
        self.question = question
        self.messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": question},
        ]
        self.asks_model = False
        self.asked: list[dict[str, Any]] = []  # what the model has asked for and not heard
        self.extras: dict[str, Any] = {}
        self.source: str | None = None  # the call that the answer rests on

    def step(self, observation: str) -> dict[str, Any]:
        if self.question is None:
            self.begin(observation)
        if self.asked:
            return {"tool_calls": self.asked}
        last = self.messages[-1]
        if last["role"] != "assistant":
            self.asks_model = True
            arguments = {"messages": self.messages, "tools": self.tools}
            return {"tool_calls": [{"name": MODEL, "arguments": arguments}]}
        decision = {"action": last["content"] or "", "extras": self.extras}
        if self.source is not None:
            decision["provenance"] = {
                "reasoning": "what the tool returned",
                "confidence": 1.0,
                "tool_call_id": self.source,
            }
        self.question = None
        return decision

    def on_tool_result(self, tool_id: str, result: Any) -> None:
        if not self.asks_model:
            call = self.asked.pop(0)
            content = json.dumps(result)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            self.source = tool_id
            return
        self.asks_model = False
        if "error" in result:  # the model cannot be had: no answer is better than a guess
            self.messages.append({"role": "assistant", "content": ""})
            return
        choice = result["choices"][0]
        self.messages.append(choice["message"])
        self.asked = list(choice["message"].get("tool_calls") or [])
        self.extras = {
            "model": result.get("model"),
            "token_ids": choice.get("token_ids"),
            "logprobs": choice.get("logprobs"),
        }
