"""POST /register and /unregister in both dialects: a body in, an answer out.

The request itself shows its dialect: `model_name` is Dynamo (A), `modelname` RFC #1403 (B).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvindex import BusyError, ClosedError
from kvindex.service.apis import dynamo, rfc
from kvindex.service.http.messages import (
    JSON,
    Reply,
    Request,
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


_Change = Callable[[Service, Mapping[str, Any]], Reply]


def _carried_out(change: _Change, service: Service, request: Request) -> Reply:
    body = request.body
    if request.media_type != JSON:
        return text_reply(415, "send the body with content-type: application/json")
    if len(body) > _MOST_BYTES:
        return refused(413, f"the body has {len(body)} bytes, more than {_MOST_BYTES}", "body")
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE as error:
        return text_reply(400, f"the body cannot be read: {error}")
    if not isinstance(fields, dict):
        return text_reply(422, "the body has not the right form: it is no object")
    try:
        return change(service, fields)
    except msgspec.ValidationError as error:
        return text_reply(422, f"the body has not the right form: {error}")
    except RegistrationError as error:
        return refused(_STATUS[error.reason], str(error), error.reason)
    except EndpointRefusedError as error:
        return refused(403, str(error), error.reason)
    except (BusyError, ClosedError) as error:
        return refused(503, str(error), "busy")


def _register(service: Service, fields: Mapping[str, Any]) -> Reply:
    if "model_name" in fields or "modelname" not in fields:
        ours = msgspec.convert(fields, dynamo.DynamoRegister)
        return dynamo.registered(service.registry.register(ours.registration()))
    registration = msgspec.convert(fields, rfc.RfcRegister).registration()
    service.registry.register(registration)
    return rfc.registered(registration)


def _unregister(service: Service, fields: Mapping[str, Any]) -> Reply:
    if "model_name" in fields:
        service.registry.unregister(
            **msgspec.convert(fields, dynamo.DynamoUnregister).which(), by_client=True
        )
        return dynamo.unregistered()
    if "modelname" in fields or isinstance(fields.get("instance_id"), str):
        which = msgspec.convert(fields, rfc.RfcUnregister).which()
    else:  # it says what is missing
        which = msgspec.convert(fields, dynamo.DynamoUnregister).which()
    return rfc.unregistered(service.registry.unregister(**which, by_client=True))
