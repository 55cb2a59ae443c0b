"""Dialect A: the HTTP API of NVIDIA Dynamo's standalone indexer, as of 1.6.1."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from kvindex import RankStatus, State
from kvindex.service.catalog import DEFAULT_GROUP, Catalog, Partition, Registration
from kvindex.service.http.messages import Reply, json_reply
from kvindex.service.registry import Effect
from kvindex.wire.errors import RegistrationError

# Bounds that msgspec cannot check are described here, and checked below.
_U64 = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1, extra_json_schema={"minimum": 1})]
_TCP = r"^tcp://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:([1-9][0-9]{0,3}|[1-5][0-9]{4})$"
Endpoint = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _TCP})]

_MOST_MODELS = 20  # that a 404 names
_MOST_SHOWN = 200  # characters of a name that it repeats
_ENDPOINT = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?(.*)", re.DOTALL)

STATUS = {
    State.LIVE: "active",
    State.REPAIRING: "active",
    State.CONNECTING: "pending",
    State.SYNCING: "pending",
    State.STALE: "failed",
    State.CLOSED: "failed",
}


class DynamoRegister(msgspec.Struct, frozen=True):
    """The body of POST /register; other fields are ignored, `tenant_id` among them."""

    instance_id: _U64
    endpoint: Endpoint
    model_name: str
    block_size: _Size
    routing_group: str = DEFAULT_GROUP
    dp_rank: U32 = 0
    replay_endpoint: Endpoint | None = None

    def __post_init__(self) -> None:
        _check_u64(self.instance_id)

    def registration(self) -> Registration:
        """Return what it asks for.

        Raises:
            RegistrationError: an endpoint or the block size cannot be.
        """
        check_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            try:
                check_endpoint(self.replay_endpoint)
            except RegistrationError as error:
                raise RegistrationError(
                    f"invalid replay endpoint `{self.replay_endpoint}`: {error}", reason="invalid"
                ) from None
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
    dp_rank: U32 | None = None

    def __post_init__(self) -> None:
        _check_u64(self.instance_id)

    def which(self) -> dict[str, Any]:
        """Return arguments of `Registry.unregister`."""
        return {
            "worker": str(self.instance_id),
            "model": self.model_name,
            "routing_group": self.routing_group,
            "dp_rank": None if self.routing_group is None else self.dp_rank,
        }


def _check_u64(number: int) -> None:
    if number >= 2**64:
        raise ValueError(f"instance_id must be below 2^64, not {number}")


def check_endpoint(endpoint: str) -> None:
    """Raise RegistrationError, in this dialect's words, for what is no endpoint."""
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


def registered(outcome: Effect) -> Reply:
    """Return the answer to a registration: 201 for a new one, 200 for one that was there."""
    return json_reply(201 if outcome == "new" else 200, {"status": "ok"})


def not_registered(catalog: Catalog, partition: Partition) -> Reply:
    """Return the answer for a partition that is not registered, with the models that are."""
    models = catalog.models[:_MOST_MODELS]
    named = Partition(*(f"{name:.{_MOST_SHOWN}}" for name in partition))
    return json_reply(404, {"error": f"no indexer for {named}", "models": models})


def unregistered() -> Reply:
    """Return the answer to an unregistration."""
    return json_reply(200, {"status": "ok"})


def workers(statuses: Iterable[tuple[Registration, RankStatus | None]]) -> list[dict[str, Any]]:
    """Return the answer to GET /workers: each instance with its listeners."""
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
        listener = _listener(entry, status)
        instance["endpoints"][str(entry.dp_rank)] = entry.endpoint
        instance["listeners"][str(entry.dp_rank)] = listener
        worst = ("failed", "pending", "active")
        instance["status"] = min(instance["status"], listener["status"], key=worst.index)
    return list(instances.values())


def _listener(entry: Registration, status: RankStatus | None) -> dict[str, Any]:
    if status is None:
        return {"endpoint": entry.endpoint, "status": "failed", "last_error": "not subscribed to"}
    word = STATUS[status.state]
    listener: dict[str, Any] = {"endpoint": entry.endpoint, "status": word}
    if word == "failed":
        listener["last_error"] = status.reason or f"its state is {status.state}"
    listener.update(
        state=status.state,
        reason=status.reason,
        complete=status.complete,
        lag=status.lag,
        dp_rank=status.rank.dp_rank,
    )
    return listener
