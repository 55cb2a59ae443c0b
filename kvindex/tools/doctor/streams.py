"""The state of an engine's streams: by the client, and by the messages received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvindex import BACKEND, BlockHash, Client, Rank, RankStatus, State
from kvindex.tools.doctor.case import Case, Finding, finding_of
from kvindex.tools.doctor.engine import EngineMetrics
from kvindex.wire.quirks import may_remove

_MANY: Final = 20  # blocks, or prompts, from which a share of them means something
_MOMENT: Final = 0.05  # seconds to receive what has arrived already
_MAX_NODES: Final = 2_000
_LIMITED: Final = {
    *("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba")
}  # kinds of groups that do not keep every block of a prompt


def check_streams(case: Case, client: Client, before: Mapping[Rank, int | None]) -> None:
    """Note what the client reports of the engine's ranks, which had these last batches before."""
    statistics = client.statistics()
    for rank, status in client.statuses().items():
        if rank.worker == case.name:
            _check_status(case, status, running=status.seq != before.get(rank, status.seq))
            _check_index(case, status.rank.dp_rank, statistics["ranks"][str(rank)]["index"])
    sizes = set(event_block_sizes(case, statistics))
    received = ", ".join(map(str, sorted(sizes)))
    stated, assumed = case.block_size, case.shared.block_size
    if sizes and stated and stated not in sizes:
        case.add("block-size-differs", stated=stated, received=received)
    if sizes and assumed and assumed not in sizes:
        case.add("block-size-assumed", assumed=assumed, received=received)
    _check_offload(case, statistics)


def event_block_sizes(case: Case, statistics: Mapping[str, Any]) -> list[int]:
    """Return the block sizes in a worker's events, as its index has them."""
    return [
        group["block_size"]
        for rank in statistics["ranks"].values()
        if rank["rank"].rpartition("/")[0] == case.name
        for group in rank["index"].get("groups", {}).values()
        if group["block_size"]
    ]


def check_received(case: Case) -> None:
    """Note what the messages show and no client does."""
    if case.listener is None or case.worker is None:
        return
    for rank in case.listener.differing():
        endpoint = next(a.endpoint for a in case.addresses if a.dp_rank == rank)
        case.add("several-publishers", rank, endpoint=endpoint)
    for rank in filtered(case):
        topics = case.listener.topics(rank)
        case.add("topic-filtered", rank, filter=case.worker.topic, topics=topics)
    models = case.report.models if case.report else ()
    for rank in case.listener.received:
        first, topics = case.listener.first(rank), case.listener.topics(rank)
        for topic in topics:
            # Routers that read a topic's name look for the engine's blocks under its model.
            parts = topic.split("@", 2)  # kv@POD@MODEL
            if len(parts) == 3 and models and parts[2] not in models:
                served = ", ".join(models)
                case.add("topic-names-another", rank, topic=topic, named=parts[2], models=served)
        if first.missing:
            case.add("numbers-jump", rank, missing=first.missing, messages=first.messages)
        if first.stored >= _MANY and first.stored_again * 10 >= first.stored:
            again, stored = first.stored_again, first.stored
            case.add("evicted-before-reuse", rank, again=again, stored=stored)


def filtered(case: Case) -> list[int]:
    """Return the ranks of which messages were received and none passes the worker's filter."""
    listener, worker = case.listener, case.worker
    if listener is None or worker is None or not worker.topic:
        return []
    listener.listen(lambda: all(map(listener.topics, listener.received)), _MOMENT)
    return [
        rank
        for rank in listener.received
        if (topics := listener.topics(rank))
        and not any(topic.startswith(worker.topic) for topic in topics)
    ]


def prompt_tokens(metrics: EngineMetrics) -> float | None:
    """Return how many prompt tokens an engine has processed, if its metrics have that."""
    return metrics.total("vllm:prompt_tokens", "sglang:prompt_tokens")


def check_serving(case: Case, before: float | None) -> None:
    """Note that the engine computed prompts, beyond these tokens, while no events were received."""
    if case.http is None or case.listener is None or before is None:
        return
    after = prompt_tokens(case.http.metrics())
    if any(reception.messages for ranks in case.listener.received.values() for reception in ranks):
        return
    # Two blocks at least: less fills none, and is published by nobody.
    served = int((after or 0.0) - before)
    if served >= 2 * (case.block_size or 16):
        case.add("silent-while-serving", prompt_tokens=served)


def check_hashes(cases: Iterable[Case]) -> None:
    """Note the same tokens under different hashes: what consumers of hashes trip over."""
    hashes: dict[int, dict[BlockHash, tuple[str, Case]]] = defaultdict(dict)
    for case in cases:
        if (listener := case.listener) is None:
            continue
        for rank in listener.received:
            for tokens, block_hash in listener.first(rank).first_hashes.items():
                hashes[tokens].setdefault(block_hash, (f"{case.name}/{rank}", case))
    for by_hash in hashes.values():
        if len(by_hash) > 1:
            ranks = sorted(by_hash.values(), key=lambda named: named[0])
            ranks[0][1].add("hash-seeds-differ", ranks=", ".join(name for name, _ in ranks[:8]))
            return  # one finding is enough


def check_prefixes(client: Client) -> list[Finding]:
    """Return where prompts part, if most of them part at one place and the index can report it."""
    if BACKEND != "native":
        return []
    prefixes = client.index.prefixes(max_nodes=_MAX_NODES)
    leaves = sum(node.children == 0 for node in prefixes.nodes) + prefixes.left_out
    leaves += sum(node.left_out for node in prefixes.nodes)
    parting, tokens = prefixes.children, 0
    for node in prefixes.nodes:
        if node.children > parting:
            parting, tokens = node.children, (node.depth + node.blocks) * node.block_size
    # A few prompts may part anywhere; of many, four in five.
    if parting < _MANY or parting * 5 < leaves * 4:
        return []
    evidence: dict[str, Any] = {"prompts": parting, "all": leaves, "tokens": tokens}
    return [finding_of("prompts-diverge", "prompts", **evidence)]


def _check_status(case: Case, status: RankStatus, *, running: bool) -> None:
    rank = status.rank.dp_rank
    if status.state in (State.SYNCING, State.REPAIRING) and running and status.seq is not None:
        done = status.seq + 1
        case.add("replay-running", rank, done=done, known=done + status.lag, reason=status.reason)
    elif status.state is not State.LIVE and rank not in case.broken:
        case.add("stream-not-live", rank, state=str(status.state), reason=status.reason)
    # Without a replay endpoint the past is unknown: that is a finding of its own.
    elif status.state is State.LIVE and not status.complete and status.replay_endpoint:
        case.add("stream-incomplete", rank, losses=status.losses, reason=status.reason)
    if status.decode_failures:
        case.add("undecodable", rank, failures=status.decode_failures)


def _check_index(case: Case, rank: int, index: Mapping[str, Any]) -> None:
    kinds = {group["kind"] for group in index.get("groups", {}).values()}
    placeless = {name: index.get(name, 0) for name in ("orphans", "unplaced")}
    ignored: dict[str, int] = index.get("ignored", {})
    reasons = {**placeless, **ignored}
    if kinds & _LIMITED:  # their events leave places out, though nothing was lost
        reasons = ignored
        if kinds <= _LIMITED and any(placeless.values()):
            case.add("windows-only", rank, kinds=sorted(kinds), blocks=index["blocks"], **placeless)
    counted = {reason: count for reason, count in reasons.items() if count}
    # Less than a hundredth changes no hit rate that anybody would notice.
    total = sum(counted.values())
    if total and total * 100 >= index.get("blocks", 0):
        case.add("blocks-left-out", rank, count=total, reasons=_counts(counted))
    if unknown := may_remove(index.get("skipped", {})):
        case.add("events-unknown", rank, tags=_counts(unknown))
    for advice in index.get("advice", []):
        case.add("setting-untold", rank, advice=advice)


def _check_offload(case: Case, statistics: Mapping[str, Any]) -> None:
    """Note hits in a store whose blocks no event names."""
    external = case.metrics.total("vllm:external_prefix_cache_hits") or 0.0
    if sources := case.metrics.by_label("vllm:prompt_tokens_cached_by_source", "source"):
        external = sum(sources.get(name, 0.0) for name in ("host", "disk", "external_unspecified"))
    # The unspecified are then transfers: what a prefill engine sends to a decode engine is in no
    # store, and is announced on the GPU.
    if case.metrics.total("vllm:nixl_xfer_time_seconds_count"):
        external = sources.get("host", 0.0) + sources.get("disk", 0.0)
    media = {
        medium
        for rank in statistics["ranks"].values()
        if rank["rank"].rpartition("/")[0] == case.name
        for medium in rank["index"].get("media", {})
    }
    # Where events name another medium, the connector announces its blocks.
    if external and media <= {"GPU"}:
        case.add("offload-unseen", external=int(external), media=sorted(media))


def _counts(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(by_name.items()))
