"""One tick of a lane on the bus: its rows, in as many messages as the server's limit asks for."""

from __future__ import annotations

from typing import NamedTuple

from dsec.env_runtime.packing import Row, pack, split
from dsec.platform.bus import Bus, TooLarge
from dsec.platform.clock import utc_now


class Unfit(NamedTuple):
    """A row that fits no message, and why."""

    row: Row
    message: str


async def publish(
    bus: Bus, rows: list[Row], *, lane: str, worker: str, tick: int, traceparent: str | None
) -> list[Unfit]:
    """Publish the rows of a tick, behind the worker's fence.

    Returns:
        The rows that fit no message, which alone are not published.

    Raises:
        PublishRefused: the worker was fenced.
    """
    now = utc_now()
    unfit: list[Unfit] = []
    portions = list(split(rows, bus.max_payload_bytes))
    part = 0
    while portions:
        portion = portions.pop(0)
        try:
            await bus.publish(
                pack(portion, worker, lane, tick),
                lane,
                source=f"dsec/env-runtime/{worker}",
                time=now,
                event_id=f"{lane}.{tick}.{part}",
                traceparent=traceparent,
                fence=worker,
            )
        except TooLarge as error:
            if len(portion) == 1:
                unfit.append(Unfit(portion[0], str(error)))
                continue
            # The estimate was too low; half of it fits, or half of that.
            middle = len(portion) // 2
            portions[:0] = [portion[:middle], portion[middle:]]
        part += 1
    return unfit
