"""The scheduler: admits, queues, places, re-places and ends sessions."""
