"""A language agent that asks a model, which asks for tools; its turns are DSec tool calls."""
