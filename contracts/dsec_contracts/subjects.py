"""Subjects: where a message travels. `dsec.<noun>.<verb>.<key>`, one rule for every event.

`<key>` is the session id, or the lane for columns and for replies, or the worker, spec hash or
event id where the event is about one of those.
"""

from __future__ import annotations

import hashlib
import re

STREAM = "DSEC"
ROOT = "dsec"
DEAD_LETTER = "dsec.dead"
"""`dsec.dead.<consumer>`: messages that a consumer gave up, with error, bytes and headers."""
FENCE = "dsec.fence"
"""`dsec.fence.<worker>`: its last sequence is what a worker's publishes are checked against."""

TOOL = "dsec.tool.>"
"""All that is said of tool calls."""

STREAM_SUBJECTS = [
    "dsec.session.>",
    "dsec.reward.>",
    TOOL,
    "dsec.anchor.>",
    "dsec.spec.>",
    "dsec.policy.>",
    "dsec.service.>",
    "dsec.curriculum.>",
    "dsec.feedback.>",
    "dsec.worker.fenced.>",
    "dsec.fence.>",
    "dsec.dead.>",
]
"""What the stream captures. Heartbeats stay out; `>` alone would swallow replies to requests."""

_TOKEN = re.compile(r"[A-Za-z0-9_\-]{1,128}")


def token(value: object) -> str:
    """`value` as one subject token.

    Raises:
        ValueError: it is empty, too long, or has a character that is not a letter, digit, - or _.
    """
    text = str(value)
    if not _TOKEN.fullmatch(text):
        raise ValueError(f"{text!r} cannot be a subject token (letters, digits, - and _ only)")
    return text


def any_token(text: str) -> str:
    """`text` where it is a token, else its SHA-256: ids that others chose may hold anything."""
    if _TOKEN.fullmatch(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def subject(event_name: str, key: object) -> str:
    """The subject of an event: `subject("session.started", id)` is `dsec.session.started.<id>`."""
    return f"{ROOT}.{event_name}.{token(key)}"


def every(event_name: str) -> str:
    """The filter for all events of one name."""
    return f"{ROOT}.{event_name}.*"


def start(event_name: str) -> str:
    """What the subjects of all events of one name start with, and nobody else's."""
    return f"{ROOT}.{event_name}."


def fence(worker: str) -> str:
    """The fence subject of one worker."""
    return f"{FENCE}.{token(worker)}"


def dead_letter(consumer: str) -> str:
    """Where a consumer's undeliverable messages go."""
    return f"{DEAD_LETTER}.{token(consumer)}"
