"""Examples that run: `python -m dsec.examples.reinforce`."""
