"""What real engines sent, applied: the index holds and answers what the engine's own cache did."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvindex import CacheSettings, Index, Rank
from kvindex.wire import decode_batch
from kvindex.wire.quirks import fold_hash
from tests.captures import NAMES, live_payloads, truth

pytestmark = pytest.mark.conformance

RANK = Rank("engine")

BROKEN = ["sglang-0.5.5", "sglang-0.5.6"]  # their events do not tell where pages are
SOUND = [name for name in NAMES if name not in BROKEN]
VLLM = [name for name in SOUND if name.startswith("vllm")]
SGLANG = [name for name in SOUND if name.startswith("sglang") and not name.endswith("eagle")]


def index_for(name: str, *ranks: Rank) -> Index:
    index = Index()
    mode: Any = "full" if name.endswith("-full") else "incremental"
    for rank in ranks:
        index.configure(rank, CacheSettings(report_mode=mode))
    return index


@cache
def applied(name: str) -> Index:
    index = index_for(name, RANK)
    for payload in live_payloads(name):
        index.apply(RANK, payload)
    index.check()
    return index


def hit(name: str, probe: dict[str, Any], tokens: list[int]) -> int:
    lora = probe.get("lora") or probe.get("extra_key")
    return applied(name).match(tokens, lora=lora, salt=probe.get("salt"))[RANK].tokens


@pytest.mark.parametrize("name", VLLM)
def test_every_resident_block_is_the_engines(name: str) -> None:
    def label(block_hash: int | str) -> int | bytes:
        return fold_hash(bytes.fromhex(block_hash) if isinstance(block_hash, str) else block_hash)

    expected = {
        (label(block["hash"]), block["group"]): (block["copies"], block["depth"])
        for block in truth(name)["cached"]
    }
    walked = applied(name).tree(RANK).walk()
    assert {(b.block_hash, b.group_idx): (b.copies, b.depth) for b in walked} == expected
    assert len(applied(name)) == len(expected)


@pytest.mark.parametrize("name", VLLM)
def test_every_probe_of_vllm_is_answered_as_its_own_lookup_did(name: str) -> None:
    probes = truth(name)["probes"]
    if name == "vllm-0.14.0":  # salts were not on the wire before 0.17: never an overestimate
        assert all(hit(name, p, p["tokens"]) <= p["hit_tokens"] for p in probes if p["salt"])
        probes = [probe for probe in probes if not probe["salt"]]
    assert len(probes) == (17 if name == "vllm-0.14.0" else 20)
    answers = [hit(name, probe, probe["tokens"][:-1]) for probe in probes]
    assert answers == [probe["hit_tokens"] for probe in probes]


def test_full_attention_alone_would_overestimate_the_hybrid_model() -> None:
    name = "vllm-0.33.0-hybrid"
    index = Index()
    for payload in live_payloads(name):
        batch = decode_batch(payload)
        kept = [event for event in batch.events if not getattr(event, "group_idx", 0)]
        index.apply(RANK, type(batch)(ts=batch.ts, events=kept))
    probes = truth(name)["probes"]
    over = [p for p in probes if index.match(p["tokens"][:-1])[RANK].tokens > p["hit_tokens"]]
    assert len(over) == 17


@pytest.mark.parametrize("name", [*SGLANG, "sglang-0.5.12-eagle"])
def test_sglang_holds_as_many_pages_as_its_own_cache(name: str) -> None:
    assert len(applied(name)) == len(truth(name)["cached"])


@pytest.mark.parametrize("name", SGLANG)
def test_every_page_of_sglang_is_matched_with_all_before_it(name: str) -> None:
    for page in truth(name)["cached"]:
        probe = {"extra_key": page.get("extra_key"), "salt": page.get("cache_salt")}
        assert hit(name, probe, page["full_prefix"]) == len(page["full_prefix"])


@pytest.mark.parametrize("name", [*SGLANG, "sglang-0.5.12-eagle"])
def test_every_probe_of_sglang_is_answered_as_its_own_lookup_did(name: str) -> None:
    page_size = truth(name)["page_size"]
    for probe in truth(name)["probes"]:
        whole_pages = len(probe["tokens"]) // page_size * page_size
        assert hit(name, probe, probe["tokens"][:whole_pages]) == probe["hit_tokens"]


def test_content_only_hashes_of_this_recording_left_nothing_ambiguous() -> None:
    statistics = applied("sglang-0.4.10").statistics()["ranks"][str(RANK)]
    assert (statistics["ambiguous"], statistics["ignored"]) == (0, {})


@pytest.mark.parametrize("name", BROKEN)
def test_broken_events_never_answer_more_than_the_truth(name: str) -> None:
    for probe in truth(name)["probes"]:
        assert hit(name, probe, probe["tokens"]) <= probe["hit_tokens"]
    counted = applied(name).statistics()["ranks"][str(RANK)]
    assert counted["removed_unknown"] > 0, "what was lost is said"


def test_broken_events_are_counted_by_what_is_wrong_with_them() -> None:
    unknown_place = applied("sglang-0.5.5").statistics()["ranks"][str(RANK)]["ignored"]
    assert unknown_place == {"position_unknown": 1798}
    assert applied("sglang-0.5.6").statistics()["ranks"][str(RANK)]["orphaned"] == 1196


@pytest.mark.parametrize("name", NAMES)
def test_payloads_and_decoded_batches_give_the_same_index(name: str) -> None:
    decoded = index_for(name, RANK)
    for payload in live_payloads(name):
        decoded.apply(RANK, decode_batch(payload))
    assert decoded.statistics() == applied(name).statistics()
    assert set(decoded.tree(RANK).walk()) == set(applied(name).tree(RANK).walk())


@pytest.mark.parametrize("name", NAMES)
def test_interleaved_ranks_each_hold_what_one_alone_holds_and_leave_nothing(name: str) -> None:
    ranks = [Rank("engine", dp_rank) for dp_rank in range(3)]
    index = index_for(name, *ranks)
    lag = 7  # the second and third rank run behind: residents differ all the time
    sent = live_payloads(name)
    for step in range(len(sent) + 2 * lag):
        for rank in ranks:
            if 0 <= step - lag * rank.dp_rank < len(sent):
                index.apply(rank, sent[step - lag * rank.dp_rank])
    index.check()
    alone = set(applied(name).tree(RANK).walk())
    assert all(set(index.tree(rank).walk()) == alone for rank in ranks)
    together, single = index.statistics(), applied(name).statistics()
    assert together["unique_blocks"] == single["unique_blocks"]
    for rank in ranks:
        index.tree(rank).clear()
    index.check()
    left = index.statistics()
    assert (left["runs"], left["unique_blocks"], len(index)) == (0, 0, 0)
