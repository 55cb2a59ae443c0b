"""The seeded workload: what a fleet serves, holds and publishes. Needs numpy, not kvindex."""

from benchmarks.workload.fleet import Change, Fleet, Prompt
from benchmarks.workload.parted import HELD_BY, Parted, parted, place_parts
from benchmarks.workload.payloads import DynamoEncoder, Encoder, Message, MsgpackEncoder, messages
from benchmarks.workload.prompts import (
    EVERYWHERE,
    PROMPT_TOKENS,
    SENTINEL,
    is_long,
    long_prompts,
)
from benchmarks.workload.requests import Request, conversations, trace
from benchmarks.workload.segments import BLOCK_SIZE, Segment
from benchmarks.workload.source import Source

__all__ = [
    "BLOCK_SIZE",
    "EVERYWHERE",
    "HELD_BY",
    "PROMPT_TOKENS",
    "SENTINEL",
    "Change",
    "DynamoEncoder",
    "Encoder",
    "Fleet",
    "Message",
    "MsgpackEncoder",
    "Parted",
    "Prompt",
    "Request",
    "Segment",
    "Source",
    "conversations",
    "is_long",
    "long_prompts",
    "messages",
    "parted",
    "place_parts",
    "trace",
]
