"""Importing nats-py without aiohttp, which it loads for `ws://` servers alone.

Every process of a stack connects to the bus and hardly any speaks to it over a websocket, but
nats-py imports aiohttp wherever that is installed: 0.1 to 0.2 s of CPU and 10 MB a process.
So it finds a stand-in under that name, which loads the real one when it is first asked for
something. The name itself is free again afterwards, for whoever imports aiohttp for its own sake.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAME = "aiohttp"


class _Later(ModuleType):
    """A module that is imported when an attribute of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if "nats" not in sys.modules and NAME not in sys.modules:
    sys.modules[NAME] = _Later(NAME)
    try:
        importlib.import_module("nats")
    finally:
        del sys.modules[NAME]
