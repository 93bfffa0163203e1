"""The chain: one hash that stands for everything a session did so far.

`chain_0 = H(reset)`, `chain_k = H(chain_{k-1}, fact_k)`, and the end closes it over its own fact.
Two sessions are equal if their last hashes are; the first difference is found by bisection.
Identity (session id, attempt, time, position, spec hash) never enters.
"""

from __future__ import annotations

from hashlib import sha256

from dsec_contracts.canonical import encode

HASH_BYTES = 32
DIGEST_BYTES = 16
_NONE = bytes(HASH_BYTES)


def digest16(data: bytes) -> bytes:
    """The first 16 bytes of SHA-256: how states, observations and inputs are named."""
    return sha256(data).digest()[:DIGEST_BYTES]


def chain_start(reset: bytes) -> bytes:
    """chain_0, from canonical `[state_hash, observation_hash, info]` of the first reset."""
    return sha256(b"dsec.chain.1" + reset).digest()


def chain_next(chain: bytes, fact: bytes) -> bytes:
    """chain_k, from chain_{k-1} and the canonical fact of step k."""
    return sha256(chain + fact).digest()


def chain_end(
    chain: bytes | None, status: str, code: str, steps: int, episodes: int, inputs: bytes
) -> bytes:
    """The last hash of a session. `chain` is None where it never started."""
    return sha256((chain or _NONE) + encode([status, code, steps, episodes, inputs])).digest()
