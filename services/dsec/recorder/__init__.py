"""The recorder: the only writer of the log. It appends before it acknowledges."""
