"""env-runtime: hosts sessions, hundreds to a worker process, and steps them in lanes."""
