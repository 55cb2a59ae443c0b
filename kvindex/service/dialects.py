"""The HTTP API in two dialects: queries, registrations and outcomes, a request in, an answer out.

Dialect A is the API of NVIDIA Dynamo's standalone indexer, as of 1.6.1; dialect B is the JSON of
Mooncake's RFC #1403. The request itself shows its dialect: `model_name` is A, and B is `model` in a
query, `modelname` in a registration.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from kvindex import BusyError, ClosedError, KVIndexError, RankStatus, State
from kvindex.service.catalog import DEFAULT_GROUP, Catalog, Partition, Registration
from kvindex.service.http.messages import (
    JSON,
    Reply,
    Request,
    json_reply,
    read_json,
    refused,
    text_reply,
)
from kvindex.service.queries import QueryError, read_query
from kvindex.service.service import Service
from kvindex.wire.errors import UNREADABLE, EndpointRefusedError, RegistrationError

# Bounds that msgspec cannot check are described here, and checked below.
_U64 = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_TCP = r"^tcp://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:([1-9][0-9]{0,3}|[1-5][0-9]{4})$"
_Endpoint = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _TCP})]

_OCTETS: Final = b"application/octet-stream"
_ENDPOINT: Final = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?(.*)", re.DOTALL)
_MOST_MODELS: Final = 20  # that a 404 names
_MOST_CHARACTERS: Final = 200  # of a name that it repeats
_MOST_BYTES: Final = 16 << 10  # of a registration, which is kept and saved

_QUERY_STATUS: Final = {"malformed": 400, "too_many": 413}
_REGISTRATION_STATUS: Final = {"conflict": 409, "unknown": 404, "invalid": 400, "room": 503}

LISTENER_STATUS: Final = {
    State.LIVE: "active",
    State.REPAIRING: "active",
    State.CONNECTING: "pending",
    State.SYNCING: "pending",
    State.STALE: "failed",
    State.CLOSED: "failed",
}
"""Dynamo's words for the states of ranks."""


# Queries ------------------------------------------------------------------------------------------


class DynamoQuery(msgspec.Struct):
    """A query in the words of NVIDIA Dynamo's indexer."""

    token_ids: list[_U32]
    model_name: str
    routing_group: str = "default"
    lora_name: str | None = None
    cache_salt: str | None = None


class RfcQuery(msgspec.Struct):
    """A query in the words of Mooncake's RFC #1403."""

    token_ids: list[_U32]
    model: str
    tenant_id: str | None = None
    instance_id: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class _Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a query besides its tokens; which of them count is the dialect's."""

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
    body = request.body
    try:
        if request.media_type == JSON:
            query = read_query(body, max_tokens=service.max_tokens)
            fields, tokens = _fields.decode(query.rest), query.token_ids
        elif request.media_type == _OCTETS:
            if len(body) % 4:
                return text_reply(422, f"the body has {len(body)} bytes, no multiple of 4")
            count, most = len(body) // 4, service.max_tokens
            if count > most:
                why = f"the query has {count} tokens, more than {most}: see --max-tokens"
                return refused(413, why, "tokens")
            parameters = {name: values[-1] for name, values in request.parameters.items()}
            fields = msgspec.convert(parameters, _Fields)
            if sys.byteorder == "little":
                # Read in place: no token is copied.
                tokens = memoryview(body).cast("I")
            else:
                numbers = array("I", body)
                numbers.byteswap()
                tokens = memoryview(numbers)
        else:
            return text_reply(
                415,
                "send the query with content-type application/json, or application/octet-stream "
                "(32-bit little-endian tokens)",
            )
    except QueryError as error:
        return text_reply(_QUERY_STATUS.get(error.reason, 422), str(error))
    except msgspec.ValidationError as error:
        return text_reply(422, f"the query has not the right form: {error}")
    except UNREADABLE as error:
        return text_reply(400, f"the body is no JSON: {error}")
    if tokens is None:
        return text_reply(422, "the query has no field `token_ids`")
    try:
        return _answer(service, fields, tokens)
    except KVIndexError as error:  # what `match` refuses
        return refused(422, str(error))


def _answer(service: Service, fields: _Fields, tokens: memoryview) -> Reply:
    """Answer a query that was read, in its dialect."""
    is_dynamo = service.dialect == "dynamo" or (
        service.dialect == "auto" and (fields.model_name is not None or fields.model is None)
    )
    model = fields.model_name if is_dynamo else fields.model
    if model is None:
        name = "model_name" if is_dynamo else "model"
        return text_reply(422, f"the query has no field `{name}`")
    group = fields.routing_group if is_dynamo else fields.tenant_id or DEFAULT_GROUP
    # Fields of B only, so they are of any type until here: in a query of A nobody reads them.
    if not isinstance(group, str):
        return text_reply(422, f"tenant_id must be a string, not {group!r:.40}")
    if not is_dynamo and not isinstance(fields.instance_id, (str, type(None))):
        return text_reply(422, f"instance_id must be a string, not {fields.instance_id!r:.40}")
    partition = Partition(model, group)
    ranks = service.ranks_of(partition)
    if ranks is None:
        if is_dynamo:
            return _not_registered(service.catalog, partition)
        # The RFC has no error for that: nobody holds anything of it.
        return json_reply(200, {group: {}})
    if not is_dynamo and fields.instance_id is not None:
        ranks = ranks.only(fields.instance_id)
    # In both dialects "" stands for no adapter and no salt.
    hits, trusts = service.match(
        ranks, tokens, lora=fields.lora_name or None, salt=fields.cache_salt or None
    )
    return Reply(200, ranks.form("dynamo" if is_dynamo else "rfc").write(hits, trusts))


def _not_registered(catalog: Catalog, partition: Partition) -> Reply:
    """Return Dynamo's answer for a partition that is not registered, with the models that are."""
    # Both bounded: names come from clients, and nobody reads a list of thousands.
    models = catalog.models[:_MOST_MODELS]
    shortened = Partition(*(f"{name:.{_MOST_CHARACTERS}}" for name in partition))
    return json_reply(404, {"error": f"no indexer for {shortened}", "models": models})


# Registrations ------------------------------------------------------------------------------------


class DynamoRegister(msgspec.Struct, frozen=True):
    """The body of POST /register; other fields are ignored, `tenant_id` among them."""

    instance_id: _U64
    endpoint: _Endpoint
    model_name: str
    block_size: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1, extra_json_schema={"minimum": 1})]
    routing_group: str = DEFAULT_GROUP
    dp_rank: _U32 = 0
    replay_endpoint: _Endpoint | None = None

    def __post_init__(self) -> None:
        _check_u64(self.instance_id)

    def registration(self) -> Registration:
        """Return what it asks for, or raise RegistrationError."""
        _check_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            try:
                _check_endpoint(self.replay_endpoint)
            except RegistrationError as error:
                raise RegistrationError(
                    f"invalid replay endpoint `{self.replay_endpoint}`: {error}", reason="invalid"
                ) from None
        # Dynamo takes 0, which is "not known" here and would spare a rank the check against others.
        if not self.block_size:
            raise RegistrationError("block_size must be 1 or more, not 0", reason="invalid")
        return Registration(
            instance_id=self.instance_id,
            partition=Partition(self.model_name, self.routing_group),
            dp_rank=self.dp_rank,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            block_size=self.block_size,
        )


class DynamoUnregister(msgspec.Struct, frozen=True):
    """The body of POST /unregister; without a routing group the whole instance goes."""

    instance_id: _U64
    model_name: str
    routing_group: str | None = None
    dp_rank: _U32 | None = None

    def __post_init__(self) -> None:
        _check_u64(self.instance_id)


class RfcRegister(msgspec.Struct, frozen=True):
    """The body of POST /register; fields that are not named here are ignored."""

    modelname: str
    instance_id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    endpoint: _Endpoint | None = None
    replay_endpoint: _Endpoint | None = None
    dp_rank: _U32 = 0
    tenant_id: str | None = None
    type: str = ""
    lora_name: str | None = None

    def registration(self) -> Registration:
        """Return what it asks for, or raise RegistrationError."""
        if not self.endpoint:
            raise RegistrationError(
                "name the endpoint of the engine's events: `endpoint`", reason="invalid"
            )
        _check_endpoint(self.endpoint)
        return Registration(
            instance_id=self.instance_id,
            partition=Partition(self.modelname, self.tenant_id or DEFAULT_GROUP),
            dp_rank=self.dp_rank,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint or None,
            block_size=self.block_size,
            details={"type": self.type, "lora_name": self.lora_name or ""},
        )


class RfcUnregister(msgspec.Struct, frozen=True):
    """The body of POST /unregister; without a dp_rank the whole instance goes."""

    instance_id: str
    modelname: str | None = None
    tenant_id: str | None = None
    dp_rank: _U32 | None = None


def _check_u64(number: int) -> None:
    if number >= 2**64:
        raise ValueError(f"instance_id must be below 2^64, not {number}")


def _check_endpoint(endpoint: str) -> None:
    """Raise RegistrationError, in Dynamo's words, for what is no endpoint."""
    parts = _ENDPOINT.fullmatch(endpoint)
    scheme, rest = parts.groups() if parts else (None, "")
    if scheme is None:
        trouble = "missing scheme"
    elif scheme not in ("tcp", "ipc", "inproc"):
        trouble = f"unsupported scheme `{scheme}`"
    elif scheme == "tcp" and ":" not in rest.rpartition("]")[2]:
        trouble = "missing TCP port"
    elif not rest:
        trouble = "missing address"
    else:
        return
    raise RegistrationError(f"invalid ZMQ endpoint `{endpoint}`: {trouble}", reason="invalid")


def register(service: Service, request: Request) -> Reply:
    """Return the answer to a registration; waits for the subscriber's thread."""
    return _carry_out(_register, service, request)


def unregister(service: Service, request: Request) -> Reply:
    """Return the answer to an unregistration; waits for the subscriber's thread."""
    return _carry_out(_unregister, service, request)


def _carry_out(
    change: Callable[[Service, Mapping[str, Any]], Reply], service: Service, request: Request
) -> Reply:
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
        return refused(_REGISTRATION_STATUS[error.reason], str(error), error.reason)
    except EndpointRefusedError as error:
        return refused(403, str(error), error.reason)
    except (BusyError, ClosedError) as error:
        return refused(503, str(error), "busy")


def _register(service: Service, fields: Mapping[str, Any]) -> Reply:
    # A body that shows no dialect is read as Dynamo's: the error says what is missing.
    if "model_name" in fields or "modelname" not in fields:
        entry = msgspec.convert(fields, DynamoRegister).registration()
        effect = service.registry.register(entry)
        return json_reply(201 if effect == "new" else 200, {"status": "ok"})
    entry = msgspec.convert(fields, RfcRegister).registration()
    service.registry.register(entry)
    return json_reply(
        200, {"status": "registered successfully", "instance_id": str(entry.instance_id)}
    )


def _unregister(service: Service, fields: Mapping[str, Any]) -> Reply:
    is_rfc = "modelname" in fields or isinstance(fields.get("instance_id"), str)
    if "model_name" in fields or not is_rfc:
        of_dynamo = msgspec.convert(fields, DynamoUnregister)
        group = of_dynamo.routing_group
        service.registry.unregister(
            str(of_dynamo.instance_id),
            model=of_dynamo.model_name,
            routing_group=group,
            dp_rank=None if group is None else of_dynamo.dp_rank,
            by_client=True,
        )
        return json_reply(200, {"status": "ok"})
    of_rfc = msgspec.convert(fields, RfcUnregister)
    gone = service.registry.unregister(
        of_rfc.instance_id,
        model=of_rfc.modelname,
        routing_group=of_rfc.tenant_id or DEFAULT_GROUP,
        dp_rank=of_rfc.dp_rank,
        by_client=True,
    )
    removed = [
        f"{entry.instance_id}|{entry.partition.routing_group}|{entry.dp_rank}" for entry in gone
    ]
    return json_reply(200, {"status": "unregistered successfully", "removed_instances": removed})


# Views --------------------------------------------------------------------------------------------


def workers(statuses: Iterable[tuple[Registration, RankStatus | None]]) -> list[dict[str, Any]]:
    """Return Dynamo's answer to GET /workers: each instance with its listeners."""
    instances: dict[str, dict[str, Any]] = {}
    for entry, status in statuses:
        instance = instances.get(entry.worker)
        if instance is None:
            instance = instances[entry.worker] = {
                "instance_id": entry.instance_id,
                "source": entry.source,
                "status": "active",
                "model_name": entry.partition.model,
                "routing_group": entry.partition.routing_group,
                "block_size": 0,
                "endpoints": {},
                "listeners": {},
            }
        instance["block_size"] = max(instance["block_size"], entry.block_size)
        listener: dict[str, Any] = {"endpoint": entry.endpoint}
        if status is None:
            listener.update(status="failed", last_error="not subscribed to")
        else:
            listener["status"] = LISTENER_STATUS[status.state]
            if listener["status"] == "failed":
                listener["last_error"] = status.reason or f"its state is {status.state}"
            # Ours, besides Dynamo's own fields.
            listener.update(
                state=status.state,
                reason=status.reason,
                complete=status.complete,
                lag=status.lag,
                dp_rank=status.rank.dp_rank,
            )
        instance["endpoints"][str(entry.dp_rank)] = entry.endpoint
        instance["listeners"][str(entry.dp_rank)] = listener
        # An instance is as good as its worst listener.
        worst = ("failed", "pending", "active")
        instance["status"] = min(instance["status"], listener["status"], key=worst.index)
    return list(instances.values())


def services(registrations: Iterable[Registration]) -> dict[str, Any]:
    """Return the RFC's answer to GET /services."""
    services = [
        {
            "Endpoint": entry.endpoint,
            "ReplayEndpoint": entry.replay_endpoint or "",
            "Type": entry.details.get("type", ""),
            "ModelName": entry.partition.model,
            "LoraName": entry.details.get("lora_name", ""),
            "TenantID": entry.partition.routing_group,
            "InstanceID": str(entry.instance_id),
            "BlockSize": entry.block_size,
            "DPRank": entry.dp_rank,
        }
        for entry in registrations
    ]
    return {"count": len(services), "services": services}


# Outcomes -----------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True):
    """The body of POST /outcomes: one finished request, in tokens.

    Attributes:
        model_name, routing_group: the partition.
        asked: in its prompt.
        attainable: of these, those that the best rank held when it was routed.
        chosen: those that the chosen rank was expected to find cached.
        delivered: those that its engine did find; null if it did not report them.
    """

    model_name: str
    asked: _U32
    attainable: _U32
    chosen: _U32
    delivered: _U32 | None = None
    routing_group: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        for name in ("attainable", "chosen", "delivered"):
            if (getattr(self, name) or 0) > self.asked:
                raise ValueError(f"{name} must not be more than asked, {self.asked} tokens")


def count_outcome(service: Service, request: Request) -> Reply:
    """Count the cached tokens of a finished request, which a router reports."""
    report = read_json(request, Outcome)
    partition = Partition(report.model_name, report.routing_group)
    if partition not in service.catalog.partitions:
        return _not_registered(service.catalog, partition)
    service.traffic.outcome(
        partition, report.asked, report.attainable, report.chosen, report.delivered
    )
    return json_reply(200, {"status": "ok"})
