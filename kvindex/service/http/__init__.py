"""An HTTP/1.1 server with guards, by httptools; it knows nothing of engines and indexes.

Routes receive a `Request` with its whole body and return a `Reply` or a `Stream`. The `Guard`
admits requests; every limit on memory and time is in `Limits`.
Read first: `messages.py`, then `site.py`, `connections.py` and `server.py`.
"""

from kvindex.service.http.guards import Guard, Limits, Networks, Refusal, is_loopback
from kvindex.service.http.messages import (
    JSON,
    PEER,
    BrokenOffError,
    Handler,
    Headers,
    RefusedError,
    Reply,
    Request,
    Route,
    Stream,
    Writer,
    json_reply,
    sending,
)
from kvindex.service.http.server import (
    Beside,
    HttpServer,
    Listening,
    raise_descriptors,
    read_tokens,
)
from kvindex.service.http.site import Count, Site

__all__ = [
    "JSON",
    "PEER",
    "Beside",
    "BrokenOffError",
    "Count",
    "Guard",
    "Handler",
    "Headers",
    "HttpServer",
    "Limits",
    "Listening",
    "Networks",
    "Refusal",
    "RefusedError",
    "Reply",
    "Request",
    "Route",
    "Site",
    "Stream",
    "Writer",
    "is_loopback",
    "json_reply",
    "raise_descriptors",
    "read_tokens",
    "sending",
]
