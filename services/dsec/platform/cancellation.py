"""Whether the running task was cancelled: for loops that run for ever.

`asyncio.wait_for`, which the bus client is built on, loses a cancellation that comes in the same
moment as the answer. A loop that only waits to be cancelled then goes on for ever, and whoever
waits for it to end waits for ever too.
"""

from __future__ import annotations

import asyncio


def cancelled() -> bool:
    """Whether somebody cancelled the running task, and it was not called off again."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
