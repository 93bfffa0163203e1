"""How environments enter: an adapter gives `deterministic_reset(seed)` and `state_hash()`."""
