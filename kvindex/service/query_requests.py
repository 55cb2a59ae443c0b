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
from kvindex.service.messages import (
    JSON,
    MSGPACK_TYPES,
    UNREADABLE,
    Reply,
    Request,
    json_reply,
    packed,
    refused,
    text_reply,
)
from kvindex.service.queries import QueryError, read_query
from kvindex.service.service import Ranks, Service

__all__ = ["answer"]

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
    try:
        if kind == JSON:
            return _answer_json(service, body)
        if kind == _OCTETS:
            return _answer_octets(service, request)
        if kind in MSGPACK_TYPES:
            return _answer_msgpack(service, body)
    except KVIndexError as error:  # what `match` refuses
        return refused(422, str(error))
    return text_reply(
        415,
        "send the query with content-type application/json, application/msgpack, or "
        "application/octet-stream (32-bit little-endian tokens)",
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
    refusal = _too_many(service, len(body) // 4)
    if refusal is not None:
        return refusal
    return _answer(service, msgspec.convert(named, _Fields), conductor.little_endian(body))


def _answer_msgpack(service: Service, body: bytes) -> Reply:
    try:
        fields = msgspec.msgpack.decode(body)
    except UNREADABLE as error:
        return packed(refused(400, f"the body is no msgpack: {error}"))
    if not isinstance(fields, dict):
        return packed(refused(400, "the body is no map"))
    if _is_conductor(service, fields):
        return _answer_conductor(service, fields)
    return packed(_answer_map(service, fields))


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


def _answer_map(service: Service, fields: Mapping[str, Any]) -> Reply:
    """Answer a msgpack query of dialects A, B and D."""
    try:
        named = msgspec.convert({**fields, "token_ids": None}, _Fields)
    except msgspec.ValidationError as error:
        return refused(422, f"the query has not the right form: {error}")
    given = fields.get("token_ids")
    if not isinstance(given, (bytes, list)):
        return refused(422, "token_ids must be little-endian 32-bit integers as bin, or an array")
    tokens = conductor.packed_tokens(given)
    if not isinstance(tokens, memoryview):
        return refused(422, tokens[0])
    return _too_many(service, len(tokens)) or _answer(service, named, tokens)


def _answer_conductor(service: Service, fields: Mapping[str, Any]) -> Reply:
    asked = conductor.query(fields)
    if isinstance(asked, Reply):
        return asked
    ranks = service.ranks_of(asked.partition)
    if ranks is None:
        return conductor.not_registered()
    refusal = _too_many(service, len(asked.token_ids))
    if refusal is not None:
        return packed(refusal)
    hits, _ = service.match(ranks, asked.token_ids, lora=asked.lora, salt=asked.salt)
    return conductor.answer(ranks.instances, hits, asked.instance)


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
    if is_dynamo:
        return Reply(200, ranks.form("dynamo").write(hits, trusts))
    return Reply(200, ranks.form(_kind(service, ranks, fields)).write(hits, trusts))


def _kind(service: Service, ranks: Ranks, fields: _Fields) -> str:
    """Return whether a query with `model` is MindIE's or the RFC's."""
    if service.dialect != "auto":
        return service.dialect
    return "motor" if ranks.of_mindie or fields.hit_detail else "rfc"


def _too_many(service: Service, tokens: int) -> Reply | None:
    if tokens <= service.max_tokens:
        return None
    said = f"the query has {tokens} tokens, more than {service.max_tokens}: see --max-tokens"
    return refused(413, said, "tokens")
