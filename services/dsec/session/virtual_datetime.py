"""The module ``datetime`` as shipped code imports it: ``now`` asks the active session's clock.

The real classes are C types that cannot be patched, so shipped code gets stand-ins. A stand-in is
asked for three things: to build dates, to be tested against, and to be subclassed. It builds *real*
datetimes, so what leaves user code (pickles, observations, hashes) never mentions it; its metaclass
makes ``isinstance`` and ``issubclass`` agree with the real class in both directions.

A session's local time zone is UTC. Outside a session the real methods answer.

Not covered: installed libraries, which have the real classes, and ``now`` called on an instance.
"""

from __future__ import annotations

import datetime as real
import types
from typing import Any, Final

from dsec.session import chance

_UNIX: Final = real.datetime(1970, 1, 1, tzinfo=real.timezone.utc)  # noqa: UP017 - `real` is clearer


def _virtual_now() -> real.datetime | None:
    """The session's time in UTC, aware; ``None`` outside a session."""
    active = chance.current()
    if active is None:
        return None
    return _UNIX + real.timedelta(microseconds=active.time_ns() // 1_000)


class _StandIn(type):
    """Metaclass: a stand-in is, to every test, the class it stands for."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL.get(cls, ())) or type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _REAL.get(cls, ())) or type.__subclasscheck__(cls, subclass)

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls in _REAL and _REAL[cls] is other)

    def __hash__(cls) -> int:
        return type.__hash__(cls)

    def __repr__(cls) -> str:
        return repr(_REAL[cls]) if cls in _REAL else type.__repr__(cls)


class VirtualDatetime(real.datetime, metaclass=_StandIn):
    """Stands for ``datetime.datetime``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return real.datetime.__new__(_built(cls), *args, **kwargs)

    @classmethod
    def now(cls, tz: real.tzinfo | None = None) -> Any:
        now = _virtual_now()
        if now is None:
            return super().now(tz)
        local = now.replace(tzinfo=None) if tz is None else now.astimezone(tz)
        return cls.combine(local.date(), local.timetz())

    @classmethod
    def utcnow(cls) -> Any:
        return super().utcnow() if chance.current() is None else cls.now()

    @classmethod
    def today(cls) -> Any:
        return super().today() if chance.current() is None else cls.now()

    @classmethod
    def fromtimestamp(cls, timestamp: float, tz: real.tzinfo | None = None) -> Any:
        if tz is None and chance.current() is not None:
            return super().fromtimestamp(timestamp, real.timezone.utc).replace(tzinfo=None)  # noqa: UP017
        return super().fromtimestamp(timestamp, tz)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: Any) -> Any:
        return handler(real.datetime)


class VirtualDate(real.date, metaclass=_StandIn):
    """Stands for ``datetime.date``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return real.date.__new__(_built(cls), *args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        now = _virtual_now()
        return super().today() if now is None else cls(now.year, now.month, now.day)

    @classmethod
    def fromtimestamp(cls, timestamp: float) -> Any:
        if chance.current() is None:
            return super().fromtimestamp(timestamp)
        day = VirtualDatetime.fromtimestamp(timestamp)
        return cls(day.year, day.month, day.day)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: Any) -> Any:
        return handler(real.date)


_REAL: Final[dict[type, type]] = {}


def _built(cls: type) -> Any:
    """The class of what is built: the real one, except for the user's own subclasses."""
    return _REAL.get(cls, cls)


_REAL.update({VirtualDatetime: real.datetime, VirtualDate: real.date})


def _module() -> types.ModuleType:
    module = types.ModuleType("datetime", real.__doc__)
    module.__dict__.update(
        {name: value for name, value in vars(real).items() if not name.startswith("__")}
    )
    module.__dict__.update(datetime=VirtualDatetime, date=VirtualDate, __all__=real.__all__)
    return module


module: Final = _module()
"""What ``import datetime`` binds in shipped code."""
