"""The tool service: makes the calls that agents ask for (`python -m dsec.tool`)."""
