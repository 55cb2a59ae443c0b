"""Engines' answers to the question where they publish, read without trusting them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

MAX_RANKS: Final = 1024
"""Most DP ranks that one engine may name; the largest deployments have some hundreds."""

_MAX_TEXT = 1024
_MAX_MODELS = 256


class Announcement(msgspec.Struct, frozen=True):
    """An engine's report of where one rank publishes, in its own words.

    Attributes:
        dp_rank: the rank.
        endpoint: of its PUB socket.
        replay: of its replay socket, or None.
        topic: of its messages.
        names_base: whether the endpoints are rank 0's, from which this one's follows.
    """

    dp_rank: int
    endpoint: str
    replay: str | None = None
    topic: str = ""
    names_base: bool = False


def read_sources(answer: Any) -> list[Announcement]:
    """Return vLLM's `/kv_event_sources`, by rank; nothing if events are off.

    The answer has three shapes: settings by rank (vLLM 0.31 and later), a list with one entry for
    each rank, and such a list under "sources".

    Raises:
        ValueError: the answer has none of these shapes.

    Examples:
        >>> read_sources({"1": {"publisher": "zmq", "endpoint": "tcp://*:5558"}})
        [Announcement(dp_rank=1, endpoint='tcp://*:5558', replay=None, topic='', names_base=False)]
    """
    if isinstance(answer, Mapping) and isinstance(answer.get("sources"), list):
        answer = answer["sources"]
    if isinstance(answer, list):
        entries = [(_rank_in(entry, place), entry) for place, entry in enumerate(answer)]
    elif isinstance(answer, Mapping):
        entries = [(_number(str(key), "rank"), entry) for key, entry in answer.items()]
    else:
        raise ValueError(f"expected a list or an object, not {_kind(answer)}")
    if len(entries) > MAX_RANKS:
        raise ValueError(f"{len(entries)} ranks, above the limit of {MAX_RANKS}")
    announced = [_source(rank, entry) for rank, entry in entries if _publishes(entry)]
    if len({source.dp_rank for source in announced}) < len(announced):
        raise ValueError("a rank is named twice")
    return sorted(announced, key=lambda source: source.dp_rank)


def read_server_info(info: Mapping[str, Any]) -> tuple[list[Announcement], int | None]:
    """Return the ranks in SGLang's `/server_info`, and the tokens of a block.

    `kv_events` (0.5.13 and later) has the values in use. Before, `kv_events_config` has the option
    as it was given, as text or as an object.

    Raises:
        ValueError: the answer cannot be understood.

    Examples:
        >>> read_server_info(
        ...     {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'}
        ... )[0]
        [Announcement(dp_rank=0, endpoint='tcp://*:5557', replay=None, topic='', names_base=True)]
    """
    config = info.get("kv_events_config")
    if isinstance(config, str):
        config = msgspec.json.decode(config) if config.strip() else None
    config = config if isinstance(config, Mapping) else {}
    described = info.get("kv_events")
    block_size = positive(info.get("page_size"))
    size = _count(info.get("dp_size"))
    if isinstance(described, Mapping) and _publishes(described):
        size = _count(described.get("dp_size", size))
        block_size = positive(described.get("block_size")) or block_size
        base = _described(described, "", "endpoint_port_base")
        replay = _described(described, "replay_", "replay_endpoint_port_base")
        topic = _text(described, "topic") or ""
        if base is None:
            raise ValueError("kv_events names no endpoint_port_base")
    elif _publishes(config) and config.get("publisher"):
        base, replay = _text(config, "endpoint") or "tcp://*:5557", None
        topic = _text(config, "topic") or ""
    else:
        return [], block_size
    replay = replay or _text(config, "replay_endpoint")
    return [Announcement(rank, base, replay, topic, True) for rank in range(size)], block_size


def is_sglang(info: Any) -> bool:
    """Return whether this is SGLang's `/server_info`, not another server's of that name."""
    marks = ("kv_events", "kv_events_config", "internal_states", "page_size", "disable_radix_cache")
    return isinstance(info, Mapping) and any(mark in info for mark in marks)


def named_models(answer: Any) -> tuple[tuple[str, ...], str]:
    """Return the ids in `/v1/models`, and the owner of the first; malformed entries are left out.

    Examples:
        >>> named_models({"data": [{"id": "llama", "owned_by": "vllm"}]})
        (('llama',), 'vllm')
    """
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = [entry for entry in data or () if isinstance(entry, Mapping)]
    names = [entry["id"] for entry in entries[:_MAX_MODELS] if _is_text(entry.get("id"))]
    owner = entries[0].get("owned_by") if entries else None
    return tuple(names), str(owner) if _is_text(owner) else ""


def named_adapters(answer: Any) -> tuple[str, ...]:
    """Return the ids in `/v1/models` that have a parent: LoRA adapters of another model there.

    Examples:
        >>> named_adapters({"data": [{"id": "llama"}, {"id": "sql", "parent": "llama"}]})
        ('sql',)
    """
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = [entry for entry in data or () if isinstance(entry, Mapping)][:_MAX_MODELS]
    named = [entry["id"] for entry in entries if _is_text(entry.get("id"))]
    own = [entry["id"] for entry in entries if entry.get("parent") and entry.get("id") in named]
    return tuple(own)


def without_secrets(answer: Any) -> Any:
    """Return an answer without the keys and passwords that SGLang puts into `/server_info`."""
    if isinstance(answer, Mapping):
        return {
            key: without_secrets(value)
            for key, value in answer.items()
            if not str(key).lower().endswith(("api_key", "password", "secret", "keyfile_password"))
        }
    if isinstance(answer, list):
        return [without_secrets(value) for value in answer]
    return answer


def _source(rank: int, entry: Mapping[str, Any]) -> Announcement:
    endpoint = _text(entry, "endpoint")
    if endpoint is None:
        raise ValueError(f"rank {rank} has no endpoint")
    return Announcement(
        rank, endpoint, _text(entry, "replay_endpoint"), _text(entry, "topic") or ""
    )


def _rank_in(entry: Any, place: int) -> int:
    if not isinstance(entry, Mapping):
        raise ValueError(f"entry {place} is {_kind(entry)}, not an object")
    return _number(str(entry.get("data_parallel_rank", entry.get("dp_rank", place))), "rank")


def _publishes(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected the settings of a rank, not {_kind(entry)}")
    return entry.get("enable_kv_cache_events") is not False and entry.get("publisher") != "null"


def _described(info: Mapping[str, Any], prefix: str, key: str) -> str | None:
    """Return the endpoint that SGLang describes by host and port."""
    if info.get(key) is None:
        return None
    port = _number(str(info[key]), key)
    host = _text(info, f"{prefix}endpoint_host") or _text(info, "endpoint_host") or "*"
    return f"tcp://[{host}]:{port}" if ":" in host and host[0] != "[" else f"tcp://{host}:{port}"


def _text(info: Mapping[str, Any], key: str) -> str | None:
    value = info.get(key)
    if value is None or value == "":
        return None
    if not _is_text(value):
        raise ValueError(f"{key} is {_kind(value)}, not a short text")
    return str(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ValueError(f"{what} {text[:40]!r} is no number")
    return int(text)


def positive(value: Any) -> int | None:
    """Return a number above 0 and of 31 bits, or None."""
    return value if isinstance(value, int) and 0 < value < 1 << 31 else None


def _count(value: Any) -> int:
    size = 1 if value is None else _number(str(value), "dp_size")
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"dp_size {size} is not 1 to {MAX_RANKS}")
    return size


_KINDS: Mapping[type, str] = {list: "a list", dict: "an object", str: "text", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number or a truth value")


# Where an endpoint can be reached ---------------------------------------------------------------


_TCP = re.compile(r"tcp://(\[[^\[\]/\s]+\]|::|[^\[\]/:\s]+):(\d{1,5})")
_WILDCARDS = {"*", "0.0.0.0", "::"}

Resolve: TypeAlias = Callable[[str], frozenset[str]]
"""Returns the addresses of a host's name; none if it has none."""


class Reached(msgspec.Struct, frozen=True):
    """Where a rank's socket can be reached, or why not.

    Attributes:
        endpoint: to connect to; None if it cannot be reached from here.
        note: a remark about it; "" if it is as expected.
    """

    endpoint: str | None
    note: str = ""


def reach(endpoint: str, engine: str, *, offset: int, resolve: Resolve) -> Reached:
    """Return where to connect to for an endpoint that an engine names.

    A wildcard, the engine's own address and its loopback are replaced by the host that was asked.
    Any other host is used as reported: the DP ranks of one engine may run on several.

    Args:
        endpoint: in the engine's words.
        engine: the host of the engine's URL.
        offset: added to the port: the engine names rank 0's only.
        resolve: looks names up.

    Examples:
        >>> reach("tcp://*:5557", "10.0.0.5", offset=1, resolve=addresses_of).endpoint
        'tcp://10.0.0.5:5558'
    """
    if endpoint.startswith("ipc://") and _is_loopback(engine) and not offset:
        return Reached(endpoint)
    parts = _TCP.fullmatch(endpoint)
    if parts is None:
        return Reached(None, f"{endpoint!r} cannot be reached from another process or host")
    host, port = parts[1].strip("[]"), int(parts[2]) + offset
    if not 1 <= port <= 65_535 or parts[2] == "0":
        return Reached(None, f"{endpoint!r} names no port that can be connected to")
    if host in _WILDCARDS or host == engine:
        return Reached(with_host(engine, port))
    if _is_loopback(host) and not _is_loopback(engine):
        return Reached(
            with_host(engine, port),
            f"{endpoint} is the engine's own loopback: {engine} is tried instead, but write "
            f"tcp://*:{port - offset} in its settings if nothing answers",
        )
    if resolve(host) & resolve(engine):
        return Reached(with_host(engine, port))
    return Reached(
        with_host(host, port),
        f"{endpoint} is another host than {engine} and used as reported, since ranks may run on "
        "several hosts; an engine whose settings name a concrete host connects there instead of "
        f"listening: if nothing answers, write tcp://*:{port - offset} in them",
    )


def with_host(host: str, port: int) -> str:
    """Return the endpoint of a port of a host, in brackets if it is an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host's name; none if it is unknown."""
    try:
        return frozenset(look_up_host(host))
    except (OSError, UnicodeError):
        return frozenset()


def look_up_host(host: str) -> list[str]:
    """Return the addresses of a host's name; OSError or UnicodeError if it is unknown."""
    known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in known]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
