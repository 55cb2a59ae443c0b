"""Dialect C: Mooncake's conductor as it is built in C++; msgpack only, and strict."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvindex import Hits, Rank
from kvindex.service.apis.dynamo import check_endpoint
from kvindex.service.catalog import DEFAULT_GROUP, Partition, Registration
from kvindex.service.http.messages import MSGPACK, RefusedError, Reply
from kvindex.wire.errors import RegistrationError

_I32 = 2**31 - 1
Fault: TypeAlias = "tuple[str, str]"  # reason and message
Check: TypeAlias = Callable[[Any], "Fault | None"]


def _is(kinds: type | tuple[type, ...], words: str, *, is_empty_refused: bool = False) -> Check:
    def check(value: Any) -> Fault | None:
        if not isinstance(value, kinds):
            return "invalid_type", f"must be {words}"
        return ("invalid_value", "must not be empty") if is_empty_refused and not value else None

    return check


def _whole(least: int) -> Check:
    def check(value: Any) -> Fault | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return "invalid_type", "must be an integer"
        if not least <= value <= _I32:
            return "out_of_range", f"must be {least} to {_I32}"
        return None

    return check


def _group(value: Any) -> Fault | None:
    if value is None or value == 0:
        return None
    return "unsupported", "may only be 0: kvindex learns the groups from the events"


def _profile(value: Any) -> Fault | None:
    """Check what is kept only to be shown again: in JSON and in a file."""
    if not isinstance(value, dict):
        return "invalid_type", "must be a map"
    plain = (str, int, float, type(None))
    if all(isinstance(key, str) and isinstance(of, plain) for key, of in value.items()):
        return None
    return "invalid_type", "must be a map of strings to strings and numbers"


_TEXT = _is(str, "a string", is_empty_refused=True)
_MAYBE_EMPTY = _is(str, "a string")
_TOKENS = _is((bytes, list), "little-endian 32-bit integers as bin, or an array")


class _Form(NamedTuple):
    """The fields of a body; the first ones are required."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check]


_QUERY = _Form(
    {"model": _TEXT, "block_size": _whole(1), "token_ids": _TOKENS},
    {
        "tenant_id": _MAYBE_EMPTY,
        "lora_name": _MAYBE_EMPTY,
        "cache_salt": _is((str, type(None)), "a string"),
        "instance_id": _MAYBE_EMPTY,
    },
)
_REGISTER = _Form(
    {
        **dict.fromkeys(("endpoint", "type", "modelname", "instance_id"), _TEXT),
        "block_size": _whole(1),
        "dp_rank": _whole(0),
        "hash_profile": _profile,
    },
    {
        **dict.fromkeys(("replay_endpoint", "lora_name", "tenant_id"), _MAYBE_EMPTY),
        "cache_group": _group,
    },
)
_UNREGISTER = _Form({"instance_id": _TEXT, "dp_rank": _whole(0)}, {"tenant_id": _MAYBE_EMPTY})


class ConductorQuery(NamedTuple):
    """A query of this API."""

    partition: Partition
    token_ids: memoryview
    lora: str | None
    salt: str | None
    instance: str | None


def _check(fields: Mapping[str, Any], form: _Form) -> None:
    """Raise RefusedError for what is wrong with a request's fields."""
    checks = {**form.required, **form.optional}
    for name in fields:
        if name not in checks:
            raise _refusal("unknown_field", f"unsupported field: {name}", name)
    for name, check in checks.items():
        if name in fields:
            fault = check(fields[name])
            if fault is not None:
                raise _refusal(fault[0], f"{name} {fault[1]}", name)
        elif name in form.required:
            raise _refusal("missing", f"{name} is required", name)


def _refusal(reason: str, message: str, field: str, **more: int) -> RefusedError:
    error = {"error": message, "reason": reason, "field": field, **more}
    return RefusedError(Reply(400, msgspec.msgpack.encode(error), MSGPACK))


class TokensError(ValueError):
    """Tokens that cannot be read.

    Attributes:
        index: of the token that is none; None if there is no such token.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


def packed_tokens(value: bytes | list[Any]) -> memoryview:
    """Return tokens as 32-bit integers.

    Args:
        value: little-endian 32-bit integers, signed or not, or whole numbers from 0 to 2^32-1.

    Raises:
        TokensError: it is something else.
    """
    if isinstance(value, bytes):
        if len(value) % 4:
            raise TokensError(f"token_ids has {len(value)} bytes, no multiple of 4")
        return little_endian(value)
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            why = f"token_ids[{index}] is {token!r:.40}: a token is 0 to 4294967295"
            raise TokensError(why, index)
    return memoryview(array("I", value))


def little_endian(data: bytes | memoryview) -> memoryview:
    """Return little-endian 32-bit integers as those of this machine, in place if they are."""
    if memoryview(array("H", [1])).cast("B")[0]:
        return memoryview(data).cast("I")
    numbers = array("I", bytes(data))
    numbers.byteswap()
    return memoryview(numbers)


def query(fields: Mapping[str, Any]) -> ConductorQuery:
    """Return what a query's body asks, or raise RefusedError."""
    _check(fields, _QUERY)
    try:
        tokens = packed_tokens(fields["token_ids"])
    except TokensError as error:
        more = {} if error.index is None else {"index": error.index}
        raise _refusal("invalid_value", str(error), "token_ids", **more) from None
    return ConductorQuery(
        Partition(fields["model"], fields.get("tenant_id") or DEFAULT_GROUP),
        tokens,
        fields.get("lora_name") or None,
        fields.get("cache_salt") or None,
        fields.get("instance_id"),
    )


def registration(fields: Mapping[str, Any]) -> Registration:
    """Return what a registration's body asks for, or raise RefusedError."""
    _check(fields, _REGISTER)
    try:
        check_endpoint(fields["endpoint"])
    except RegistrationError as error:
        raise _refusal("invalid_registration", str(error), "endpoint") from None
    details = {name: fields.get(name) for name in ("type", "cache_group", "hash_profile")}
    return Registration(
        instance_id=fields["instance_id"],
        partition=Partition(fields["modelname"], fields.get("tenant_id") or DEFAULT_GROUP),
        dp_rank=fields["dp_rank"],
        endpoint=fields["endpoint"],
        replay_endpoint=fields.get("replay_endpoint") or None,
        block_size=fields["block_size"],
        details={**details, "lora_name": fields.get("lora_name") or ""},
    )


def which(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Registry.unregister`, or raise RefusedError."""
    _check(fields, _UNREGISTER)
    return {
        "worker": fields["instance_id"],
        "routing_group": fields.get("tenant_id") or DEFAULT_GROUP,
        "dp_rank": fields["dp_rank"],
    }


def not_registered() -> Reply:
    """Return the answer for a model that is not registered."""
    return Reply(200, msgspec.msgpack.encode({"instances": {}}), MSGPACK)


def answer(instances: list[tuple[int | str, list[Rank]]], hits: Hits, only: str | None) -> Reply:
    """Return the answer to a query: every rank of every instance, those that hold nothing too."""
    answers: dict[str, Any] = {}
    row = 0
    for named, ranks in instances:
        end = row + len(ranks)
        if only in (None, str(named)):
            answers[str(named)] = _instance(ranks, hits, slice(row, end))
        row = end
    return Reply(200, msgspec.msgpack.encode({"instances": answers}), MSGPACK)


def _instance(ranks: list[Rank], hits: Hits, rows: slice) -> dict[str, Any]:
    names = [str(rank.dp_rank) for rank in ranks]
    device, host, tokens = hits.device[rows], hits.host[rows], hits.tokens[rows]
    return {
        "longest_matched": max(tokens, default=0),
        "gpu": max(device, default=0),
        "cpu": max(host, default=0),
        "disk": max(tokens, default=0),
        "dp": dict(zip(names, device, strict=True)),
        "rank_matches": {
            name: {"gpu": d, "cpu": h, "disk": t}
            for name, d, h, t in zip(names, device, host, tokens, strict=True)
        },
    }
