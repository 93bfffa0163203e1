"""Observations that are too large to travel in a row: they lie in the object store, and the row
refers to them, or they are left out, as the environment's spec says.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsec.env_runtime.packing import Row
from dsec.env_runtime.seats import Seat
from dsec.platform.objects import ObjectStore, put_patiently
from dsec.session.io import Stepped
from dsec.session.observations import reference


async def rows_of(taken: list[tuple[Seat, Stepped]], objects: ObjectStore | None) -> list[Row]:
    """The rows of steps, as they are published; what they refer to is stored."""
    room = min(seat.inline_bytes_max for seat, _ in taken)
    if all(
        len(s.observation) <= room and len(s.prior) <= room and len(s.reset_observation) <= room
        for _, s in taken
    ):
        return [(seat.sender, stepped) for seat, stepped in taken]
    large: set[bytes] = set().union(*(_large(seat, stepped) for seat, stepped in taken))
    references = await _stored(large, objects)
    return [(seat.sender, _recorded(seat, stepped, references)) for seat, stepped in taken]


async def _stored(large: set[bytes], objects: ObjectStore | None) -> dict[bytes, bytes]:
    if objects is None:
        return {}  # nowhere to put them: not recorded, which rows say by being empty
    return {data: reference(await put_patiently(objects, data), len(data)) for data in large}


def _large(seat: Seat, stepped: Stepped) -> set[bytes]:
    """What of a step has to lie in the object store."""
    if seat.above != "reference":
        return set()
    observations = stepped.observation, stepped.prior, stepped.reset_observation
    return {data for data in observations if len(data) > seat.inline_bytes_max}


def _recorded(seat: Seat, stepped: Stepped, references: Mapping[bytes, bytes]) -> Stepped:
    """A step with references in place of large observations, or with none where none is kept."""

    def recorded(data: bytes) -> bytes:
        if len(data) <= seat.inline_bytes_max:
            return data
        # The same bytes may be another session's, which keeps them.
        return references.get(data, b"") if seat.above == "reference" else b""

    return stepped._replace(
        observation=recorded(stepped.observation),
        prior=recorded(stepped.prior),
        reset_observation=recorded(stepped.reset_observation),
    )
