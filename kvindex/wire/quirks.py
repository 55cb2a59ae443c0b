"""Oddities of engines, each as one pure function, so that the index can name what it works around.

Nothing here keeps state, and nothing here reads an event: these are facts about values, and about
requests whose engine reads no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from kvindex.wire.events import BlockHash

_MASK_64: Final = 2**64 - 1

EMPTY_TUPLE_HASH: Final = 5740354900026072187
"""CPython's `hash(())` on 64-bit machines: SGLang 0.4.8-0.5.0 names the root so."""

HARMLESS_TAGS: Final = frozenset({"BlockInactive"})
"""Unknown events that take no block away: vLLM's proposal #50730 reports blocks out of use so."""

_KNOWN_MEDIA: Final = frozenset(
    {"GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", "STORAGE", "FS", "OBJ"}
)
_HOST_MEDIA: Final = frozenset({"CPU", "CPU_PINNED"})
_SGLANG_MEDIA: Final = frozenset({"CPU_PINNED", "DISK", "EXTERNAL"})
_DEVICES: Final = ("GPU", "CUDA", "ROCM", "HIP", "XPU", "NPU", "TPU", "HPU")


def is_root_parent(parent_block_hash: BlockHash | None) -> bool:
    """Return True if this parent means the start of the prompt.

    None is the rule; LMCache and some simulators send 0; SGLang 0.4.8-0.5.0 sends `hash(())`.

    Examples:
        >>> [is_root_parent(parent) for parent in (None, 0, 5740354900026072187, 7, b"")]
        [True, True, True, False, False]
    """
    return parent_block_hash in (None, 0, EMPTY_TUPLE_HASH)


def may_remove(skipped: Mapping[str, int]) -> dict[str, int]:
    """Return the counts, by tag, of those unknown events that may have taken blocks away."""
    return {tag: count for tag, count in skipped.items() if tag not in HARMLESS_TAGS}


def content_hash(token_ids: Iterable[int]) -> int:
    """Return the label that SGLang 0.4.6-0.5.5 gives a page, as an unsigned 64-bit int.

    That is CPython's `hash(tuple(token_ids))` of a 64-bit build since 3.8, so it covers the page's
    own tokens only and not the prefix: equal pages at two places share one label.

    Raises:
        TypeError: an item that is not hashable.

    Complexity: O(tokens).
    """
    return hash(tuple(token_ids)) & _MASK_64


def is_content_hash(block_hash: BlockHash, token_ids: Sequence[int]) -> bool:
    """Return True if the label covers the block's own tokens only (see `content_hash`).

    A label from a chained 64-bit hash answers True by chance once in 2**64 blocks.
    """
    return isinstance(block_hash, int) and block_hash & _MASK_64 == content_hash(token_ids)


def fold_hash(block_hash: BlockHash) -> BlockHash:
    """Return the label without its sign: ints modulo 2**64, bytes as they are.

    Engines differ in sign (vLLM unsigned; SGLang and vLLM up to 0.10.1 signed), and a wrapper may
    change it on the way between a store and its removal.
    """
    return block_hash & _MASK_64 if isinstance(block_hash, int) else block_hash


def fold_medium(medium: str | None) -> str:
    """Return one spelling for each medium: None is "GPU", known names upper case, others verbatim.

    Known: GPU, CPU, CPU_PINNED, DISK, EXTERNAL, STORAGE, FS, OBJ. Mooncake and LMCache send lower
    case; device strings such as "cuda:0" stay as they are.

    Examples:
        >>> [fold_medium(medium) for medium in (None, "cpu", "GPU", "cuda:0")]
        ['GPU', 'CPU', 'GPU', 'cuda:0']
    """
    if medium is None:
        return "GPU"
    upper = medium.upper()
    return upper if upper in _KNOWN_MEDIA else medium


def medium_tier(folded_medium: str) -> int:
    """Return how far a medium is from the device: engines load a prefix tier by tier.

    0 is the device itself, 1 the host's memory, 2 disks and other storage, 3 unknown ones.

    Examples:
        >>> [medium_tier(medium) for medium in ("GPU", "cuda:0", "CPU_PINNED", "DISK", "tape")]
        [0, 0, 1, 2, 3]
    """
    if folded_medium.upper().startswith(_DEVICES):
        return 0
    if folded_medium in _HOST_MEDIA:
        return 1
    return 2 if folded_medium in _KNOWN_MEDIA else 3


def outlives_clear(folded_medium: str, *, resets_connector: bool = False) -> bool:
    """Return True if an engine keeps the blocks of a medium when it announces that all are cleared.

    SGLang flushes all its tiers together. vLLM clears the device only, and asks its connector to
    clear the host's memory where the reset includes that; further tiers stay in any case. The event
    is the same, but each engine has its own names for the media besides the device.

    Examples:
        >>> [outlives_clear(medium) for medium in ("GPU", "CPU_PINNED", "CPU", "STORAGE")]
        [False, False, True, True]
    """
    # Only SGLang has these names, and it flushes them with the device.
    tier = 0 if folded_medium in _SGLANG_MEDIA else medium_tier(folded_medium)
    return tier > (1 if resets_connector else 0)


def text_token(text: str) -> int:
    """Return the int that stands for a token that an engine sends as text.

    TensorRT-LLM puts the digests of images among the token ids as strings. Decoding maps each
    through this function; map a prompt's strings so too before asking. The result lies in
    [2**62, 2**63), where no vocabulary reaches, and is the same in every process.

    Complexity: O(length of text).
    """
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**62 + 2**62


def field_against_cache(body: Mapping[str, Any]) -> str:
    """Return the field of an OpenAI request for which the engine reads no cache; "" without one.

    That is where the engine must return the log probabilities of the prompt's own tokens: it has
    to compute them.

    Examples:
        >>> field_against_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        'prompt_logprobs'
    """
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if not body.get("echo"):
        return ""
    # vLLM takes the number for the prompt from the answer's, which for a chat is 0 by default:
    # only a chat that asks for `null` reads the cache.
    if "messages" in body:
        return "echo" if body.get("top_logprobs", 0) is not None else ""
    return "echo with logprobs" if body.get("logprobs") is not None else ""


def reads_cache(body: Mapping[str, Any]) -> bool:
    """Return whether the engine reads its cache for an OpenAI request, by the request's body.

    vLLM does not with `prompt_logprobs`, with `echo` and `logprobs` in a completion, with `echo` in
    a chat (unless its `top_logprobs` is null); SGLang not with `echo` and `logprobs`.

    Examples:
        >>> reads_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        False
    """
    return not field_against_cache(body)
