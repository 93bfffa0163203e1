"""The Python client: specs from files, requests, weights, episodes in columns."""
