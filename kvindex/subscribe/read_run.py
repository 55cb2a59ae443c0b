"""Read live messages by the run, as long as nothing about them is out of the ordinary.

Nearly every message is: three frames, the confirmed topic, the next seq, a payload that can be
decoded, and no news of the publisher's dp_rank. For one like that a feed's `_on_live` does nothing
but decode it and obey what the sequencer makes of it: the topic is confirmed already, no damage is
to be counted, no name to be settled. So a run of them can be read in one go, and given to
`Sequencer.live_run`, which has the same effect as its batches one by one (see there).

The first message that is not ordinary ends the run. Nothing has come of it yet, and what it was is
for `_on_live` to find out: this only looks whether all is well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvindex.errors import DecodeError
from kvindex.subscribe.stream import Decode, DecodedBatch, Fingerprint

__all__ = ["Run", "read_run"]

_unpack_seq = struct.Struct(">Q").unpack


class Run(NamedTuple):
    """Batches that follow one another, and what the sequencer needs to know of each.

    Attributes:
        batches: the decoded payloads.
        timestamps: their `ts`.
        fingerprints: a hash of each payload.
    """

    batches: list[DecodedBatch]
    timestamps: list[float]
    fingerprints: list[int]


def read_run(
    messages: Iterable[list[bytes]],
    first_seq: int,
    topic: bytes,
    decode: Decode,
    fingerprint: Fingerprint,
    *,
    named: bool,
    time_left: Callable[[], bool] = lambda: True,
) -> Run:
    """Return the ordinary messages that `messages` begins with.

    Args:
        messages: frames as they were received.
        first_seq: the seq that the first must have.
        topic: the prefix that each topic must have.
        decode: makes batches of payloads.
        fingerprint: makes hashes of them.
        named: whether the publisher's dp_rank is known already.
        time_left: asked after each message whether there is time for a further one.
    """
    run = Run([], [], [])
    batches, timestamps, fingerprints = run
    seq = first_seq
    try:
        for sent_topic, head, payload in messages:
            if _unpack_seq(head)[0] != seq or not sent_topic.startswith(topic):
                break
            batch = decode(payload)
            if not named and batch.data_parallel_rank is not None:
                break
            batches.append(batch)
            timestamps.append(batch.ts)
            fingerprints.append(fingerprint(payload))
            seq += 1
            if not time_left():
                break
    except (ValueError, struct.error, DecodeError):
        pass  # not three frames, no seq of eight bytes, or no batch
    return run
