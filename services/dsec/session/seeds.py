"""Every seed of a session, derived from the one seed it was requested with.

A session has many consumers of chance (the environment's resets, the action space, the agent, the
global generators that its code may reach for). Each gets a seed of its own, named by a purpose and
an index, so that none disturbs another: an agent that draws once more than yesterday leaves the
environment's next episode as it was. Identity (session id, attempt, time) never enters.

The encoding is part of what old logs mean, so it never changes:

    first 8 bytes, big-endian, shifted right by one, of
    SHA-256(b"dsec.seed.1\\n" + seed + b"\\n" + len(purpose) + b":" + purpose + b"\\n" + index)

with the numbers in decimal ASCII and the purpose in UTF-8, its length counted in bytes. The length
before the purpose makes the encoding unambiguous whatever the purpose contains.

Test vector: ``derive(7, "env", 0) == 2650692407565412115``.
"""

from __future__ import annotations

import hashlib
from operator import index as as_int
from typing import Final

PURPOSES: Final = (
    *("env", "action_space", "agent", "chance", "anchor"),
    *("numpy", "torch", "random", "uuid"),
    "module",
)
"""The purposes in use, so that no two consumers take the same by accident: of a session's seed;
of the seed for `chance`; and of a spec's hash, where `module:NAME` is that of one module."""


def derive(seed: int, purpose: str, index: int) -> int:
    """The seed number ``index`` for ``purpose``: 63 bits, so that it fits a signed 64-bit integer.

    ``seed`` and ``index`` may be any integers, numpy's included; a float is a ``TypeError``.
    """
    label = purpose.encode("utf-8")
    text = b"dsec.seed.1\n%d\n%d:%b\n%d" % (as_int(seed), len(label), label, as_int(index))
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
