"""The bus: the only package that imports nats."""

from shared.bus.connection import (
    MAX_PAYLOAD_BYTES,
    Bus,
    BusSettings,
    BusUnavailable,
    Message,
    NoResponder,
    RequestTimeout,
    Subscription,
    connect,
    connect_with_patience,
    settings_from,
)
from shared.bus.counters import INCREMENT_HEADER, Moved, counted, decode_moved, ensure_counters
from shared.bus.follow import Stored, StreamState, follow, forget_before, stream_state
from shared.bus.kv import Bucket, Entry, Mirror, open_bucket
from shared.bus.objects import ObjectCorrupt, Objects, delete_objects, limit_objects, open_objects
from shared.bus.pages import read_page
from shared.bus.streams import Consumer, Delivery, ensure_stream, publish_durable, read_last

__all__ = [
    "INCREMENT_HEADER",
    "MAX_PAYLOAD_BYTES",
    "Bucket",
    "Bus",
    "BusSettings",
    "BusUnavailable",
    "Consumer",
    "Delivery",
    "Entry",
    "Message",
    "Mirror",
    "Moved",
    "NoResponder",
    "ObjectCorrupt",
    "Objects",
    "RequestTimeout",
    "Stored",
    "StreamState",
    "Subscription",
    "connect",
    "connect_with_patience",
    "counted",
    "decode_moved",
    "delete_objects",
    "ensure_counters",
    "ensure_stream",
    "follow",
    "forget_before",
    "limit_objects",
    "open_bucket",
    "open_objects",
    "publish_durable",
    "read_last",
    "read_page",
    "settings_from",
    "stream_state",
]
