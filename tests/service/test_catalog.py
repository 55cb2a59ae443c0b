"""What is registered: a change makes another catalog, and shares with it what it does not touch."""

from __future__ import annotations

import random

import pytest

from kvindex.service.catalog import Catalog, Partition, Registration

pytestmark = pytest.mark.unit

A, B = Partition("a"), Partition("b", "blue")


def registered(instance: int | str, dp_rank: int = 0, partition: Partition = A) -> Registration:
    return Registration(
        instance_id=instance, dp_rank=dp_rank, partition=partition, endpoint="tcp://h:1"
    )


def test_a_change_leaves_everybody_else_as_they_are() -> None:
    # What is made anew for everybody makes registering n ranks take n * n.
    before = Catalog([registered(1), registered(1, 1), registered(2), registered(3, 0, B)])
    for after in (before.with_(registered(4, 0, B)), before.without([registered(3, 0, B)])):
        assert after.instances["1"] is before.instances["1"]
        assert after.partitions[A] is before.partitions[A]
    after = before.with_(registered(1, 2))
    assert after.instances["2"] is before.instances["2"]
    assert after.partitions[B] is before.partitions[B]
    assert list(before.instances["1"]) == [0, 1]


def test_changes_one_by_one_end_as_a_catalog_that_is_made_at_once() -> None:
    drawn = random.Random(5)
    catalog, kept = Catalog(), dict[tuple[str, int], Registration]()
    for _ in range(2_000):
        named: list[int | str] = [3, "3", 4, "x"]
        new = registered(drawn.choice(named), drawn.randrange(4), drawn.choice([A, B]))
        key = new.worker, new.dp_rank
        kept.pop(key, None)
        if drawn.random() < 0.6:
            kept[key] = new
            catalog = catalog.with_(new)
        else:
            catalog = catalog.without([new])
        made = Catalog(kept.values())
        assert catalog.registrations == made.registrations
        assert catalog.instances == made.instances
        assert catalog.partitions == made.partitions
        assert catalog.models == made.models


def test_what_is_not_there_cannot_be_taken_away() -> None:
    catalog = Catalog([registered(1)])
    assert catalog.without([registered(2)]).registrations == catalog.registrations
