"""Telling a topic that filters everything from an engine that is idle."""

from __future__ import annotations

import pytest

from kvindex.subscribe.receiving import TopicCheck

pytestmark = pytest.mark.unit


def connected(topic: bytes) -> TopicCheck:
    check = TopicCheck(topic)
    check.connected(10.0)
    return check


def test_the_empty_topic_fits_everything_and_needs_no_proof() -> None:
    check = connected(b"")
    assert (check.confirmed, check.open, check.deadline) == (True, False, None)
    assert check.fits(b"anything")


def test_a_topic_is_open_until_a_message_confirms_it() -> None:
    check = connected(b"kv")
    assert check.open
    assert check.deadline is not None
    assert check.fits(b"kv-events")
    assert not check.open
    assert check.confirmed
    assert check.deadline is None


def test_only_other_topics_contradict_it_and_are_named() -> None:
    check = connected(b"kv@")
    assert not check.fits(b"")
    assert not check.fits(b"load")
    assert check.contradicted
    assert check.filtered == 2
    assert "'kv@'" in check.trouble()
    assert "'load'" in check.trouble()


def test_a_relay_with_several_topics_is_no_contradiction() -> None:
    check = connected(b"kv@a")
    assert not check.fits(b"kv@b")
    assert check.fits(b"kv@a@model")
    assert not check.contradicted
    assert check.trouble() == ""


def test_silence_is_taken_for_consent_after_a_while() -> None:
    check = connected(b"kv")
    assert check.deadline is not None
    check.decide(check.deadline - 0.1)
    assert check.open
    check.decide(check.deadline)
    assert not check.open
    assert not check.contradicted


def test_hostile_topics_are_bounded() -> None:
    check = TopicCheck(b"kv")
    for number in range(1000):
        check.fits(b"x%d" % number)
    assert check.filtered == 1000
    assert len(check.trouble()) < 400
