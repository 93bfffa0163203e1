"""Clocks: whether this machine's is kept in step, and how far it is from the servers'."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NamedTuple

from dsec.doctor.finding import Finding

DRIFT_S_GOOD = 0.5
DRIFT_S_MAX = 30.0
_MODE_READ = 0
_UNSYNCHRONISED_BIT = 0x40  # STA_UNSYNC
_TIMEX_BYTES = 512
"""More than the structure has on any architecture."""


class Drift(NamedTuple):
    """How far another clock is ahead of ours, known to within `error_s`."""

    seconds: float
    error_s: float

    @classmethod
    def between(cls, before_s: float, there_s: float, after_s: float) -> Drift:
        """From a time that was read elsewhere between two readings of our own clock."""
        return cls(there_s - (before_s + after_s) / 2, (after_s - before_s) / 2)


class _Timex(ctypes.Structure):
    """The head of the kernel's `struct timex`, as adjtimex(2) fills it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * _TIMEX_BYTES),
    )


def synchronised() -> Finding:
    """What the kernel says of its own clock."""
    if sys.platform != "linux":
        return Finding("absent", "Only Linux says whether its clock is kept in step.")
    state = _Timex(modes=_MODE_READ)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(state)) < 0:
        reason = os.strerror(ctypes.get_errno())
        return Finding("absent", f"The kernel does not say whether the clock is right ({reason}).")
    facts = {"estimated_error_us": state.esterror, "maximum_error_us": state.maxerror}
    if state.status & _UNSYNCHRONISED_BIT:
        return Finding(
            "warn",
            "Nothing keeps this machine's clock in step, as far as the kernel knows.",
            "Run chrony or systemd-timesyncd here, or on the host of this container.",
            facts,
        )
    return Finding(
        "ok", f"The clock is kept in step, to {state.maxerror / 1000:.0f} ms at worst.", "", facts
    )


def drift_finding(server: str, drift: Drift | None) -> Finding:
    """What a measured drift means. None: it cannot be measured."""
    if drift is None:
        return Finding("absent", f"{server} does not tell its time yet: it has no stream.")
    ahead = "ahead of" if drift.seconds >= 0 else "behind"
    told = f"{server} is {abs(drift.seconds):.3f} s {ahead} this machine (±{drift.error_s:.3f} s)."
    facts = {"drift_s": drift.seconds, "error_s": drift.error_s}
    certain_s = abs(drift.seconds) - drift.error_s
    if certain_s > DRIFT_S_MAX:
        return Finding(
            "fail", told, "Set the clocks: deadlines and heartbeats go by both of them.", facts
        )
    if certain_s > DRIFT_S_GOOD:
        return Finding("warn", told, "Keep both clocks in step, with chrony for instance.", facts)
    return Finding("ok", told, "", facts)
