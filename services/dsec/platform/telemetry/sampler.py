"""Which traces are kept. Pure, and the same answer in every service without a word between them.

The answer follows from a hash of the trace id. The bits themselves will not do:

* The SDK's own ratio sampler looks at the low 64 bits and keeps the smallest ids; two of those bits
  are fixed in a UUID (`10` at the top), so that every id lies in the third quarter: a ratio of 0.4
  keeps nothing, and one of 0.8 keeps everything.
* The low 56 bits, which W3C Trace Context calls the random part, are random from one millisecond to
  the next and not within one: there, common makers of UUIDv7 count in the upper part of them. A
  group of sessions that is asked for at once would be kept as a whole or not at all.

A lower ratio keeps a part of what a higher one keeps. An upstream's own decision is not followed:
only the scheduler hears of it, and the other services would keep other traces.
"""

from __future__ import annotations

from hashlib import blake2b

_HASH_BYTES = 7
"""As exact as a float's ratio can be."""
_ID_BYTES = 16


class Ratio:
    """Keeps a share of all traces.

    Args:
        ratio: 0 keeps none, 1 all.
    """

    def __init__(self, ratio: float) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"a sampling ratio is between 0 and 1, not {ratio}")
        self.ratio = ratio
        self._below = round(ratio * (1 << 8 * _HASH_BYTES))

    def keeps(self, trace_id: int) -> bool:
        """Whether a trace is kept."""
        hashed = blake2b(trace_id.to_bytes(_ID_BYTES, "big"), digest_size=_HASH_BYTES)
        return int.from_bytes(hashed.digest(), "big") < self._below
