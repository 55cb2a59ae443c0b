"""Publish KV-cache events as engines do: their interface, their wire, any of their versions.

One thread owns the sockets, so that an engine's step never waits for a subscriber.
Read first: `publisher.py` (the interface), then `zmq_publisher.py` (the publisher and its thread).
May import: `kvindex.wire`.
"""

from kvindex.publish.publisher import EventPublisher, KVEventsConfig, NullEventPublisher
from kvindex.publish.sockets import offset_endpoint
from kvindex.publish.zmq_publisher import EventPublisherFactory, ZmqEventPublisher

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "KVEventsConfig",
    "NullEventPublisher",
    "ZmqEventPublisher",
    "offset_endpoint",
]
