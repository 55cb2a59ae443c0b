"""POST /register and /unregister in every dialect: a body in, an answer out.

The request itself shows its dialect: `model_name` is Dynamo (A); msgpack with `hash_profile`
is Mooncake's conductor (C); `modelname` otherwise is RFC #1403 and MindIE (B and D).

Dynamo's peers are refused here: its indexer copies the blocks of a peer, and then answers for
workers that are not registered with it. A new kvindex starts from `GET /snapshot` of another one,
and replay verifies that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvindex import BusyError, ClosedError
from kvindex.service.apis import conductor, dynamo, rfc
from kvindex.service.http.messages import (
    JSON,
    MSGPACK_TYPES,
    RefusedError,
    Reply,
    Request,
    packed,
    read_json,
    refused,
    text_reply,
)
from kvindex.service.service import Service
from kvindex.wire.errors import UNREADABLE, EndpointRefusedError, RegistrationError

_MOST_BYTES: Final = 16 << 10
"""Of a body: a registration is kept and saved."""

_STATUS: Final = {"conflict": 409, "unknown": 404, "invalid": 400, "room": 503}


def register(service: Service, request: Request) -> Reply:
    """Return the answer to a registration; waits for the subscriber's thread."""
    return _carried_out(_register, service, request)


def unregister(service: Service, request: Request) -> Reply:
    """Return the answer to an unregistration; waits for the subscriber's thread."""
    return _carried_out(_unregister, service, request)


class Peer(msgspec.Struct, frozen=True):
    """The body of POST /register_peer and /deregister_peer."""

    url: str


def register_peer(request: Request) -> Reply:
    """Refuse a peer."""
    read_json(request, Peer)
    said = "kvindex has no peers: start a replica with --warm-from URL, which takes GET /snapshot"
    return refused(501, said)


def deregister_peer(request: Request) -> Reply:
    """Answer that there is no such peer."""
    read_json(request, Peer)
    return refused(404, "peer not found")


_Change = Callable[[Service, Mapping[str, Any], bool], Reply]


def _carried_out(change: _Change, service: Service, request: Request) -> Reply:
    kind, body = request.media_type, request.body
    is_packed = kind in MSGPACK_TYPES
    if kind != JSON and not is_packed:
        return text_reply(415, "send the body with content-type application/json or .../msgpack")
    if len(body) > _MOST_BYTES:
        return refused(413, f"the body has {len(body)} bytes, more than {_MOST_BYTES}", "body")
    try:
        fields = msgspec.msgpack.decode(body) if is_packed else msgspec.json.decode(body)
    except UNREADABLE as error:
        return text_reply(400, f"the body cannot be read: {error}")
    if not isinstance(fields, dict):
        return text_reply(422, "the body has not the right form: it is no object")
    try:
        reply = change(service, fields, is_packed)
    except RefusedError as error:
        return error.reply
    except msgspec.ValidationError as error:
        return text_reply(422, f"the body has not the right form: {error}")
    except RegistrationError as error:
        reply = refused(_STATUS[error.reason], str(error), error.reason)
    except EndpointRefusedError as error:
        reply = refused(403, str(error), error.reason)
    except (BusyError, ClosedError) as error:
        reply = refused(503, str(error), "busy")
    return packed(reply) if is_packed else reply


def _register(service: Service, fields: Mapping[str, Any], is_packed: bool) -> Reply:
    if "model_name" in fields or "modelname" not in fields:
        ours = msgspec.convert(fields, dynamo.DynamoRegister)
        return dynamo.registered(service.registry.register(ours.registration()))
    if is_packed and "hash_profile" in fields:
        registration = conductor.registration(fields)
    else:
        registration = msgspec.convert(fields, rfc.RfcRegister).registration()
    service.registry.register(registration)
    return rfc.registered(registration)


def _unregister(service: Service, fields: Mapping[str, Any], is_packed: bool) -> Reply:
    if "model_name" in fields:
        service.registry.unregister(
            **msgspec.convert(fields, dynamo.DynamoUnregister).which(), by_client=True
        )
        return dynamo.unregistered()
    if is_packed and "modelname" not in fields:
        which = conductor.which(fields)
    elif "modelname" in fields or isinstance(fields.get("instance_id"), str):
        which = msgspec.convert(fields, rfc.RfcUnregister).which()
    else:  # it says what is missing
        which = msgspec.convert(fields, dynamo.DynamoUnregister).which()
    return rfc.unregistered(service.registry.unregister(**which, by_client=True))
