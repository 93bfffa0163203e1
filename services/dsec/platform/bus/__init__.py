"""The bus: the only package that knows NATS.

Every publish of an event is a JetStream publish whose acknowledgement is read: a plain publish to
a full stream vanishes without an error. Sizes are checked, headers included, before sending: an
oversized publish closes the client for good while the process looks alive. What is not
acknowledged is sent again under the same message id, for as long as `PUBLISHING` says.
"""

# Before whatever imports nats-py.
from dsec.platform.bus import light_client  # noqa: F401
from dsec.platform.bus.author import Author
from dsec.platform.bus.bucket import Bucket
from dsec.platform.bus.connection import Bus, nodes
from dsec.platform.bus.consumer import Consumer, ConsumerState
from dsec.platform.bus.errors import (
    BadMessage,
    BusError,
    BusUnavailable,
    NotPermitted,
    PublishRefused,
    TooLarge,
    Undecided,
)
from dsec.platform.bus.lease import Lease
from dsec.platform.bus.message import Message
from dsec.platform.bus.settler import Later, Settler
from dsec.platform.bus.settling import Signals, settle
from dsec.platform.bus.stream import StreamOptions, StreamState

__all__ = [
    "Author",
    "BadMessage",
    "Bucket",
    "Bus",
    "BusError",
    "BusUnavailable",
    "Consumer",
    "ConsumerState",
    "Later",
    "Lease",
    "Message",
    "NotPermitted",
    "PublishRefused",
    "Settler",
    "Signals",
    "StreamOptions",
    "StreamState",
    "TooLarge",
    "Undecided",
    "nodes",
    "settle",
]
