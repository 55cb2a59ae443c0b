"""Dialect B: the JSON of Mooncake's RFC #1403."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from kvindex.service.apis.dynamo import Endpoint, check_endpoint
from kvindex.service.catalog import DEFAULT_GROUP, Partition, Registration
from kvindex.service.http.messages import Reply, json_reply
from kvindex.wire.errors import RegistrationError

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class RfcRegister(msgspec.Struct, frozen=True):
    """The body of POST /register; fields that are not named here are ignored."""

    modelname: str
    instance_id: str
    block_size: _Size
    endpoint: Endpoint | None = None
    replay_endpoint: Endpoint | None = None
    dp_rank: _Rank = 0
    tenant_id: str | None = None
    type: str = ""
    lora_name: str | None = None

    def registration(self) -> Registration:
        """Return what it asks for.

        Raises:
            RegistrationError: it names no endpoint, or one that cannot be.
        """
        if not self.endpoint:
            raise RegistrationError(
                "name the endpoint of the engine's events: `endpoint`", reason="invalid"
            )
        check_endpoint(self.endpoint)
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
    dp_rank: _Rank | None = None

    def which(self) -> dict[str, Any]:
        """Return arguments of `Registry.unregister`."""
        return {
            "worker": self.instance_id,
            "model": self.modelname,
            "routing_group": self.tenant_id or DEFAULT_GROUP,
            "dp_rank": self.dp_rank,
        }


def registered(entry: Registration) -> Reply:
    """Return the answer to a registration: the same whether it is new or not."""
    return json_reply(
        200, {"status": "registered successfully", "instance_id": str(entry.instance_id)}
    )


def unregistered(gone: list[Registration]) -> Reply:
    """Return the answer to an unregistration."""
    removed = [
        f"{entry.instance_id}|{entry.partition.routing_group}|{entry.dp_rank}" for entry in gone
    ]
    return json_reply(200, {"status": "unregistered successfully", "removed_instances": removed})


def services(registrations: Iterable[Registration]) -> dict[str, Any]:
    """Return the answer to GET /services."""
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
