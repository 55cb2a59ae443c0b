"""The schemas of the OpenAPI document, most of them made from the types that read and write."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvindex import Prefixes
from kvindex.service.dialects import dynamo, rfc
from kvindex.service.explaining import Question
from kvindex.service.openapi_operations import COUNT, NAME, objects, schema
from kvindex.service.outcomes import Outcome
from kvindex.service.overview import Fleet
from kvindex.service.timeline import Happening
from kvindex.service.traffic import ASKED

__all__ = ["schemas"]

_TOKENS: Final = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_SECONDS: Final = {"type": "number"}
_COLUMNS: Final = ("at", "seconds", "live", "ranks", *ASKED)
_MAYBE: Final = {"type": ["string", "null"]}
_TCP: Final = r"^tcp://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:([1-9][0-9]{0,3}|[1-5][0-9]{4})$"


def schemas() -> dict[str, Any]:
    """Return the schemas by name."""
    found = _of_types()
    _narrow(found)
    return {**found, **_of_queries(), **_of_answers()}


def _of_types() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, kinds in (
        ("Dynamo", (dynamo.Register, dynamo.Unregister)),
        ("Rfc", (rfc.Register, rfc.Unregister)),
        ("", (Outcome, Question, Fleet, Happening, Prefixes)),
    ):
        _, made = msgspec.json.schema_components(
            kinds, ref_template=f"#/components/schemas/{prefix}{{name}}"
        )
        found.update({f"{prefix}{name}": one for name, one in made.items()})
    return found


def _narrow(found: dict[str, Any]) -> None:
    """Say what the types leave to code."""
    for name in ("DynamoRegister", "DynamoUnregister"):
        found[name]["properties"]["instance_id"]["maximum"] = 2**64 - 1
    for name in ("DynamoRegister", "RfcRegister"):
        found[name]["properties"]["endpoint"] = {"type": "string", "pattern": _TCP}
        found[name]["properties"]["replay_endpoint"] = {
            "anyOf": [{"type": "string", "pattern": _TCP}, {"type": "null"}]
        }
        found[name]["properties"]["block_size"]["minimum"] = 1
    found["RfcRegister"]["required"].append("endpoint")
    found["Prefixes"]["properties"]["unique_blocks"] = {"type": ["integer", "null"]}
    found["Question"]["oneOf"] = [
        {"required": ["token_ids"], "properties": {"text": {"type": "null"}}},
        {"required": ["text"], "properties": {"token_ids": {"type": "null"}}},
    ]


def _of_queries() -> dict[str, Any]:
    asked = {"lora_name": _MAYBE, "cache_salt": _MAYBE}
    hashes = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    by_rfc = objects(
        "token_ids",
        "model",
        token_ids=_TOKENS,
        model=NAME,
        tenant_id=_MAYBE,
        instance_id=_MAYBE,
        **asked,
    )
    by_rfc["properties"]["hit_detail"] = {}
    return {
        "DynamoQuery": objects(
            "token_ids",
            "model_name",
            token_ids=_TOKENS,
            model_name=NAME,
            routing_group=NAME,
            **asked,
        ),
        "RfcQuery": by_rfc,
        "HashQuery": objects(
            "block_hashes",
            "model_name",
            block_hashes={"type": "array", "items": hashes},
            model_name=NAME,
            routing_group=NAME,
            lora_name=_MAYBE,
            cache_salt={"type": "null"},
        ),
    }


def _of_answers() -> dict[str, Any]:
    return {
        "Answer": {"type": "object"},
        "Worker": objects(
            "instance_id",
            "status",
            "model_name",
            "routing_group",
            instance_id={"type": ["integer", "string"]},
            status={"enum": ["active", "pending", "failed"]},
            model_name=NAME,
            routing_group=NAME,
            block_size=COUNT,
            endpoints={"type": "object", "additionalProperties": NAME},
            listeners={"type": "object", "additionalProperties": {"type": "object"}},
        ),
        "Timeline": objects(
            "since",
            "id",
            "dropped",
            "happenings",
            since=_SECONDS,
            id=NAME,
            dropped=COUNT,
            happenings={"type": "array", "items": schema("Happening")},
        ),
        "Traffic": objects(
            *("now", "since", "seconds", "step", "partitions", "points"),
            now=_SECONDS,
            since=_SECONDS,
            seconds=COUNT,
            step=COUNT,
            partitions={"type": "array", "items": objects("model", "routing_group")},
            points=objects(
                *_COLUMNS, **{key: {"type": "array", "items": _SECONDS} for key in _COLUMNS}
            ),
        ),
        "Explained": objects(
            "tokens",
            "ranks",
            "left_out",
            tokens=COUNT,
            ranks={"type": "array", "items": objects("worker", "dp_rank")},
            left_out=COUNT,
        ),
    }
