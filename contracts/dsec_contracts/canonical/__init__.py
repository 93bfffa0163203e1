"""The canonical encoding: one value, one sequence of bytes, on every machine.

Facts are hashed and compared as bytes, so the bytes must depend on the value alone. JSON cannot do
that (no NaN, no infinities, no bytes, no dtypes, `-0.0` and `1e16` survive only by luck), so facts
are CBOR (RFC 8949) in its deterministic form, with these choices:

* integers take the shortest form; beyond 64 bits they are bignums (tags 2 and 3);
* floats always take 64 bits, and every NaN is `7ff8000000000000`;
* map keys are sorted by their encoded bytes; a repeated key is refused;
* text is UTF-8; text with lone surrogates is `["wtf8", bytes]` under tag 27;
* everything CBOR has no word for is an array under tag 27 (IANA: "serialised object with type
  name"): `["tuple", ...]`, `["nd", dtype, shape, bytes]`, `["np", dtype, bytes]`,
  `["named", name, fields, ...]`, `["set", ...]`, `["torch", array]`. Array bytes are C-ordered and
  little-endian, whatever the strides and the byte order of the array they came from.

The whole specification is in `contracts/README.md`, test vectors are in
`contracts/examples/canonical_vectors.json`. numpy and torch are never imported unless a value of
theirs is decoded. `form` holds what both directions share; `encoder` is the one direction,
`decoder` with `arrays` and `primitives` the other.
"""

from dsec_contracts.canonical.decoder import decode
from dsec_contracts.canonical.encoder import encode
from dsec_contracts.canonical.form import NESTING_DEPTH_MAX, CanonicalError, head

__all__ = ["NESTING_DEPTH_MAX", "CanonicalError", "decode", "encode", "head"]
