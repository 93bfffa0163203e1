"""The session: what runs when an agent meets an environment. No clock, no entropy, no I/O."""
