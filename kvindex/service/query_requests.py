"""POST /query: the request in, the answer out.

The request itself shows its dialect: `model_name` is Dynamo (A), `model` is RFC #1403 (B).
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, Final

import msgspec

from kvindex import KVIndexError
from kvindex.service.apis import dynamo
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.http.messages import (
    JSON,
    RefusedError,
    Reply,
    Request,
    json_reply,
    refusal,
    refused,
    text_reply,
)
from kvindex.service.queries import QueryError, read_query
from kvindex.service.service import Service
from kvindex.wire.errors import UNREADABLE

_OCTETS: Final = b"application/octet-stream"


class _Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a query; which of them count is the dialect's."""

    model_name: str | None = None
    model: str | None = None
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: Any = None
    instance_id: Any = None


_fields = msgspec.json.Decoder(_Fields)


def answer(service: Service, request: Request) -> Reply:
    """Return the answer to a query; raw tokens have their other fields in the URL."""
    try:
        if request.media_type == JSON:
            return _answer_json(service, request.body)
        if request.media_type == _OCTETS:
            return _answer_octets(service, request)
    except RefusedError as error:
        return error.reply
    except KVIndexError as error:  # what `match` refuses
        return refused(422, str(error))
    return text_reply(
        415,
        "send the query with content-type application/json, or application/octet-stream (32-bit "
        "little-endian tokens)",
    )


def _answer_json(service: Service, body: bytes) -> Reply:
    try:
        query = read_query(body, max_tokens=service.max_tokens)
        fields = _fields.decode(query.rest)
    except QueryError as error:
        return text_reply(_STATUS.get(error.reason, 422), str(error))
    except msgspec.ValidationError as error:
        return text_reply(422, f"the query has not the right form: {error}")
    except UNREADABLE as error:
        return text_reply(400, f"the body is no JSON: {error}")
    if query.token_ids is None:
        return text_reply(422, "the query has no field `token_ids`")
    return _answer(service, fields, query.token_ids)


_STATUS: Final = {"malformed": 400, "too_many": 413}


def _answer_octets(service: Service, request: Request) -> Reply:
    body = request.body
    if len(body) % 4:
        return text_reply(422, f"the body has {len(body)} bytes, no multiple of 4")
    named = {name: values[-1] for name, values in request.parameters.items()}
    tokens = len(body) // 4
    if tokens > service.max_tokens:
        most = service.max_tokens
        why = f"the query has {tokens} tokens, more than {most}: see --max-tokens"
        raise refusal(413, why, "tokens")
    return _answer(service, msgspec.convert(named, _Fields), _little_endian(body))


def _little_endian(data: bytes) -> memoryview:
    """Return little-endian 32-bit integers as those of this machine, in place if they are."""
    if sys.byteorder == "little":
        return memoryview(data).cast("I")
    numbers = array("I", data)
    numbers.byteswap()
    return memoryview(numbers)


def _answer(service: Service, fields: _Fields, tokens: memoryview) -> Reply:
    """Answer a query of either dialect."""
    is_dynamo = service.dialect == "dynamo" or (
        service.dialect == "auto" and (fields.model_name is not None or fields.model is None)
    )
    model = fields.model_name if is_dynamo else fields.model
    if model is None:
        name = "model_name" if is_dynamo else "model"
        return text_reply(422, f"the query has no field `{name}`")
    group = fields.routing_group if is_dynamo else fields.tenant_id or DEFAULT_GROUP
    if not isinstance(group, str):
        return text_reply(422, f"tenant_id must be a string, not {group!r:.40}")
    if not is_dynamo and not isinstance(fields.instance_id, (str, type(None))):
        return text_reply(422, f"instance_id must be a string, not {fields.instance_id!r:.40}")
    partition = Partition(model, group)
    ranks = service.ranks_of(partition)
    if ranks is None:
        if is_dynamo:
            return dynamo.not_registered(service.catalog, partition)
        return json_reply(200, {group: {}})
    if not is_dynamo and fields.instance_id is not None:
        ranks = ranks.only(fields.instance_id)
    hits, trusts = service.match(
        ranks, tokens, lora=fields.lora_name or None, salt=fields.cache_salt or None
    )
    return Reply(200, ranks.form("dynamo" if is_dynamo else "rfc").write(hits, trusts))
