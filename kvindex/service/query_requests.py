"""POST /query: the request in, the answer out.

The request itself shows its dialect:

- msgpack with `model` is Mooncake's conductor (C), unless it has `hit_detail`, or the model's
  instances were registered as MindIE does (D);
- `model_name` is Dynamo (A), whatever the body is encoded in;
- `model` in JSON is RFC #1403 (B), or MindIE (D) as above.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvindex import KVIndexError
from kvindex.service.apis import conductor, dynamo
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.http.messages import (
    JSON,
    MSGPACK_TYPES,
    RefusedError,
    Reply,
    Request,
    json_reply,
    packed,
    refusal,
    refused,
    text_reply,
)
from kvindex.service.queries import QueryError, read_query
from kvindex.service.service import Service
from kvindex.wire.errors import UNREADABLE

_OCTETS: Final = b"application/octet-stream"


class _Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a query in dialects A, B and D; which of them count is the dialect's."""

    model_name: str | None = None
    model: str | None = None
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: Any = None
    instance_id: Any = None
    hit_detail: Any = None


_fields = msgspec.json.Decoder(_Fields)


def answer(service: Service, request: Request) -> Reply:
    """Return the answer to a query; raw tokens have their other fields in the URL."""
    kind, body = request.media_type, request.body
    is_packed = kind in MSGPACK_TYPES
    try:
        if kind == JSON:
            reply = _answer_json(service, body)
        elif kind == _OCTETS:
            reply = _answer_octets(service, request)
        elif is_packed:
            reply = _answer_msgpack(service, body)
        else:
            reply = text_reply(
                415,
                "send the query with content-type application/json, application/msgpack, or "
                "application/octet-stream (32-bit little-endian tokens)",
            )
    except RefusedError as error:
        reply = error.reply
    except KVIndexError as error:  # what `match` refuses
        reply = refused(422, str(error))
    return packed(reply) if is_packed else reply


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
    _check_number(service, len(body) // 4)
    return _answer(service, msgspec.convert(named, _Fields), conductor.little_endian(body))


def _answer_msgpack(service: Service, body: bytes) -> Reply:
    try:
        fields = msgspec.msgpack.decode(body)
    except UNREADABLE as error:
        return refused(400, f"the body is no msgpack: {error}")
    if not isinstance(fields, dict):
        return refused(400, "the body is no map")
    if _is_conductor(service, fields):
        return _answer_conductor(service, fields)
    try:
        named = msgspec.convert({**fields, "token_ids": None}, _Fields)
    except msgspec.ValidationError as error:
        return refused(422, f"the query has not the right form: {error}")
    given = fields.get("token_ids")
    if not isinstance(given, (bytes, list)):
        return refused(422, "token_ids must be little-endian 32-bit integers as bin, or an array")
    try:
        tokens = conductor.packed_tokens(given)
    except conductor.TokensError as error:
        return refused(422, str(error))
    _check_number(service, len(tokens))
    return _answer(service, named, tokens)


def _is_conductor(service: Service, fields: Mapping[str, Any]) -> bool:
    """Return whether a msgpack query is of dialect C."""
    if service.dialect != "auto":
        return service.dialect == "conductor"
    if "model_name" in fields or "hit_detail" in fields:
        return False
    model, tenant = fields.get("model"), fields.get("tenant_id") or DEFAULT_GROUP
    if not (isinstance(model, str) and isinstance(tenant, str)):
        return True  # which says what is wrong with them
    ranks = service.ranks_of(Partition(model, tenant))
    return ranks is None or not ranks.of_mindie


def _answer_conductor(service: Service, fields: Mapping[str, Any]) -> Reply:
    query = conductor.query(fields)
    ranks = service.ranks_of(query.partition)
    if ranks is None:
        return conductor.not_registered()
    _check_number(service, len(query.token_ids))
    hits, _ = service.match(ranks, query.token_ids, lora=query.lora, salt=query.salt)
    return conductor.answer(ranks.instances, hits, query.instance)


def _answer(service: Service, fields: _Fields, tokens: memoryview) -> Reply:
    """Answer a query of dialects A, B and D."""
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
    if is_dynamo or service.dialect != "auto":
        form = "dynamo" if is_dynamo else service.dialect
    else:
        form = "motor" if ranks.of_mindie or fields.hit_detail else "rfc"
    return Reply(200, ranks.form(form).write(hits, trusts))


def _check_number(service: Service, tokens: int) -> None:
    if tokens > service.max_tokens:
        most = service.max_tokens
        why = f"the query has {tokens} tokens, more than {most}: see --max-tokens"
        raise refusal(413, why, "tokens")
