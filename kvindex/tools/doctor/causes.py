"""Every kind of finding: how bad it is, its sentence and its remedy, as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

__all__ = ["CAUSES", "SECTIONS", "Cause", "Severity", "words_for"]

Severity = Literal["error", "warning", "info"]
"""error: hits are (almost) none for this. warning: hits are lost for it. info: good to know."""


class Cause(msgspec.Struct, frozen=True):
    """One kind of finding; `what` and `remedy` have places for the evidence.

    Attributes:
        severity: how bad it is.
        what: the sentence.
        remedy: what to do.
        blind: whether it means that a target could not be looked at.
    """

    severity: Severity
    what: str
    remedy: str
    blind: bool = False


_ZMQ: Final = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"'
_FLAG: Final = {
    "vllm": f"--kv-events-config '{{\"enable_kv_cache_events\": true, {_ZMQ}}}'",
    "sglang": f"--kv-events-config '{{{_ZMQ}}}'",
}
_CACHING: Final = {
    "vllm": "leave out --no-enable-prefix-caching",
    "sglang": "leave out --disable-radix-cache",
}
_REPORT: Final = {
    "vllm": "--enable-prompt-tokens-details",
    "sglang": "--enable-cache-report",
}

CAUSES: Final[dict[str, Cause]] = {
    "engine-unreachable": Cause(
        "error",
        "the engine does not answer over HTTP: {error}",
        "check the URL, and that the engine has started",
        blind=True,
    ),
    "engine-denied": Cause(
        "error",
        "the engine refuses to answer without its API key",
        "give the key in KVINDEX_API_KEY, or as --api-key-file",
        blind=True,
    ),
    "endpoint-unreachable": Cause(
        "error",
        "{endpoint} cannot be reached: {error}",
        "check the host's name, routes and firewalls between here and there",
        blind=True,
    ),
    "sources-unknown": Cause(
        "warning",
        "the engine does not say where it publishes",
        "name its endpoints: kvindex doctor NAME=tcp://HOST:5557,replay=tcp://HOST:5657 --engine "
        "{url}",
        blind=True,
    ),
    # A kvindex service.
    "service-without-workers": Cause(
        "error",
        "this kvindex service knows no workers",
        "have them registered (POST /register), named (--worker), or found (--engine, --dns, "
        "--k8s-preset)",
    ),
    "service-rank-not-live": Cause(
        "error",
        "the service cannot vouch for {rank}: {reason}",
        "examine that engine itself: kvindex doctor http://ENGINE:8000",
    ),
    # What the engine says of itself.
    "events-off": Cause(
        "error",
        "the engine publishes no KV events",
        "start it with {flag}",
    ),
    "ranks-differ": Cause(
        "error",
        "the engine has the ranks {said}, you gave {given}",
        "give every rank that the engine has, and no other: what is at the other ports belongs to "
        "somebody else",
    ),
    "endpoints-differ": Cause(
        "error",
        "the engine publishes at port {said[port]} and replays at {said[replay]}; you gave "
        "{given[port]} and {given[replay]}",
        "give the ports that the engine says; where a proxy maps ports, check what it maps them to",
    ),
    "endpoints-mapped": Cause(
        "info",
        "the engine publishes at port {said[port]} and replays at {said[replay]}; you gave "
        "{given[port]} and {given[replay]}, which lead there",
        "nothing",
    ),
    "publisher-not-zmq": Cause(
        "error",
        'its events go to the publisher "{publisher}", which no subscriber here can hear',
        "start it with {flag}",
    ),
    "prefix-caching-off": Cause(
        "error",
        "prefix caching is off: nothing is cached, so nothing can be hit",
        "{caching}",
    ),
    "block-exceeds-prompts": Cause(
        "error",
        "a block has {block_size} tokens, the longest request {max_model_len}: "
        "fewer than two blocks fit, and only whole blocks are cached",
        "use a smaller block (--block-size, --page-size, or another model's layout)",
    ),
    "block-large": Cause(
        "warning",
        "a block has {block_size} tokens: shorter prompts are never cached",
        "send longer shared prefixes, or use a smaller block where the model allows it",
    ),
    "block-size-differs": Cause(
        "warning",
        "the engine says that a block has {said} tokens, its events say {heard}",
        "have routers take the size from the events, as kvindex does",
    ),
    "block-size-assumed": Cause(
        "error",
        "your router assumes {assumed} tokens a block, the engine's events say {heard}",
        "have the router take the size from the events, or set {heard}",
    ),
    "cache-small": Cause(
        "warning",
        "the cache holds {cache_tokens} tokens, less than two of the longest requests "
        "({max_model_len})",
        "give it more memory, offload to the CPU, or lower --max-model-len; with vLLM before 0.20 "
        "KV events switch off the hybrid cache manager: upgrade",
    ),
    "evicted-before-reuse": Cause(
        "warning",
        "{again} of {stored} stored blocks had been evicted shortly before: the cache is too "
        "small for what is reused",
        "more memory, offloading, or fewer ranks for each prefix",
    ),
    "version-known-bug": Cause(
        "warning",
        "{engine_name} {version}: {bug}",
        "use {engine_name} {since} or later",
    ),
    "dp-behind-one-port": Cause(
        "info",
        "{ranks} data-parallel ranks share one HTTP port: the engine chooses the rank, not you",
        "send the header X-data-parallel-rank (SGLang: the field data_parallel_rank), or give each "
        "rank a port of its own",
    ),
    "decode-only": Cause(
        "warning",
        "this engine only decodes: prompts are computed, and cached, by prefill engines",
        "route prompts by what the prefill engines hold",
    ),
    "speculates-bigrams": Cause(
        "info",
        "speculative decoding ({algorithm}): a block's hash covers one token more",
        "ask with whole pages of tokens: see docs/how-to/sglang.md",
    ),
    "offload-unseen": Cause(
        "warning",
        "the engine hit {external} tokens in an external cache, whose blocks no event tells",
        "have the connector publish (LMCache: its own publisher endpoint), or count these hits as "
        "unknown",
    ),
    "cached-tokens-unreported": Cause(
        "info",
        "answers do not say how many tokens were cached",
        "start the engine with {report}",
    ),
    "ports-collide": Cause(
        "error",
        "{endpoint} is to publish for one rank and to replay for another",
        "keep both ports at least as far apart as there are ranks: 5557 and 5657",
    ),
    "publisher-connects": Cause(
        "error",
        "nothing listens at {endpoint}: the engine connects to it, since it names a host",
        'set "endpoint": "tcp://*:PORT" in the engine, or subscribe with bind '
        "(Worker(bind=True), NAME=ENDPOINT,bind)",
    ),
    "subscriber-dials": Cause(
        "error",
        "nothing listens at {endpoint}: a subscriber of this machine dials it ({socket_type}), no "
        "engine does",
        "check that events are on ({flag}), and the port (+ the rank's number)",
    ),
    "publisher-refused": Cause(
        "error",
        "nothing listens at {endpoint}",
        "check that events are on ({flag}), the port (+ the rank's number), and that the endpoint "
        "has a * for its host: with a concrete host the engine connects instead of listening",
    ),
    "port-not-zmq": Cause(
        "error",
        "at {endpoint} {protocol} answers, not ZeroMQ",
        "give the port of the events (5557 by default), not that of another server",
    ),
    "port-reset": Cause(
        "error",
        "{endpoint} accepts connections and drops them at once",
        "connect to the pod itself: exclude the port from the sidecar or proxy, and use no Service "
        "that balances",
    ),
    "port-silent": Cause(
        "error",
        "{endpoint} accepts connections and says nothing",
        "look for a stuck process, or a proxy in front of a port where nothing listens",
    ),
    "port-encrypted": Cause(
        "error",
        "{endpoint} demands {mechanism}",
        "give the publisher's key: Worker(curve=...)",
    ),
    "publisher-wrong-socket": Cause(
        "error",
        "{endpoint} is a {socket_type} socket, not a publisher's",
        "give the events' port; a ROUTER is a replay socket: exchange the two if you gave both",
    ),
    "replay-wrong-socket": Cause(
        "error",
        "{endpoint}, given for replay, is a {socket_type} socket, not a ROUTER",
        "give the replay endpoint; is another rank's publisher there?",
    ),
    "replay-refused": Cause(
        "warning",
        "nothing listens at the replay endpoint {endpoint}",
        'set "replay_endpoint" in the engine, and keep its port away from the publishers\'',
    ),
    "replay-silent": Cause(
        "warning",
        "the replay endpoint {endpoint} does not answer",
        "restart the engine; behind a proxy, connect to the pod itself",
    ),
    "replay-of-another": Cause(
        "error",
        "{endpoint} replays another publisher's batches: batch {seq}, heard live, {there}",
        "give the replay endpoint of this rank's own publisher",
    ),
    "replay-not-given": Cause(
        "warning",
        "the engine replays at port {port}, and you gave no replay endpoint: what was published "
        "before, and each gap, stays unknown",
        "give it to the router too: NAME=ENDPOINT,replay=tcp://HOST:{port}",
    ),
    "replay-missing": Cause(
        "warning",
        "there is no replay endpoint: what was published before, and each gap, stays unknown",
        'set "replay_endpoint": "tcp://*:5657" in the engine, and give it to the router',
    ),
    "topic-filtered": Cause(
        "error",
        'the filter "{filter}" lets no message through; topics heard: {topics}',
        'subscribe with topic "", or set "topic" in the engine',
    ),
    "topic-names-another": Cause(
        "warning",
        "the topic {topic} names the model {named}, the engine serves {models}",
        "use one name in the topic and in --served-model-name: routers that read the topic look "
        "under the wrong one",
    ),
    "silent-while-serving": Cause(
        "error",
        "the engine computed {prompt_tokens} prompt tokens meanwhile, and published nothing",
        "check that the publisher is zmq, and the model: hybrid models publish nothing on some "
        "versions",
    ),
    "replay-running": Cause(
        "info",
        "its replay is still running: {done} of at least {known} batches came so far",
        "examine it again later, or give it more time (Limits.replay)",
    ),
    "stream-not-live": Cause(
        "error",
        "the stream is {state}: {reason}",
        "look at the engine's log and what stands between; docs/guarantees.md explains the states",
    ),
    "stream-incomplete": Cause(
        "warning",
        "batches are missing that replay did not bring ({losses} losses): the index knows only a "
        "part of the cache",
        "set replay_endpoint, raise buffer_steps, or restart warm (docs/how-to/warm-restart.md)",
    ),
    "numbers-jump": Cause(
        "warning",
        "{missing} numbers are missing in the live stream without a message",
        "set replay_endpoint; vLLM up to 0.10.1 with sha256 hashes loses every batch: upgrade",
    ),
    "undecodable": Cause(
        "error",
        "{failures} messages cannot be decoded",
        "record some (kvindex record) and report them: this engine's version may be new to kvindex",
    ),
    "blocks-left-out": Cause(
        "warning",
        "{count} blocks have no place in the index: {reasons}",
        "see docs/faq.md: most often batches before them were lost, or a limit is too low",
    ),
    "windows-only": Cause(
        "warning",
        "no group of this model has full attention ({kinds}): its events leave out where most "
        "blocks belong, and the index holds {blocks}",
        "run vLLM 0.29 or later with its default hash and no PYTHONHASHSEED, or route this model "
        "by load: docs/guarantees.md, exact or a bound",
    ),
    "several-publishers": Cause(
        "error",
        "connections to {endpoint} reach different publishers",
        "give each pod its own address: no Service that balances",
    ),
    "prompts-diverge": Cause(
        "info",
        "{prompts} of {all} prompts part after their first {tokens} tokens",
        "if prompts should share more, something volatile stands there (a time, an id, tools in "
        "another order): move it to the end",
    ),
    "hash-seeds-differ": Cause(
        "info",
        "the same tokens have different hashes on {ranks}",
        "kvindex is immune; consumers that go by the engine's hash need one PYTHONHASHSEED",
    ),
    "setting-untold": Cause(
        "warning",
        "{advice}",
        "give it as CacheSettings (docs/guarantees.md, exact or an upper bound)",
    ),
    "all-well": Cause(
        "info",
        "a test prompt was stored, predicted, and hit when it came again ({cached} of {sent} "
        "tokens)",
        "nothing",
    ),
    "engine-never-hits": Cause(
        "error",
        "the engine stored the prompt and did not hit it when it came again",
        "hybrid or Mamba models: --mamba-cache-mode, or another version; otherwise do not route "
        "this model by prefix",
    ),
    "rank-not-kept": Cause(
        "error",
        "the prompt came again and another of {ranks} ranks computed it, though rank {asked_for} "
        "was asked for",
        "give each rank an HTTP port of its own (vLLM: --data-parallel-external-lb), or a version "
        "that honours X-data-parallel-rank",
    ),
    "index-misses": Cause(
        "error",
        "the engine stored the prompt and hit it, but the index does not find it",
        "compare tokens, LoRA, salt and topic filter: kvindex match --explain",
    ),
    "index-and-engine-miss": Cause(
        "error",
        "the engine told of blocks of this prompt, but neither the index nor it finds the prompt",
        "the cache evicts at once, or its events have no place: see the other findings",
    ),
    "live-stream-mute": Cause(
        "warning",
        "the prompt arrived by replay only: live messages do not come through",
        "look at what stands between: a proxy that drops, a full queue (hwm), a filter",
    ),
    "live-stream-mute-no-hit": Cause(
        "error",
        "the prompt arrived by replay only, and the engine did not hit it when it came again",
        "both: look at what drops live messages, and at the model (--mamba-cache-mode)",
    ),
    "caches-unpublished": Cause(
        "error",
        "the engine hit the prompt when it came again, but published nothing of it",
        "check publisher and ports; some versions publish nothing for hybrid models",
    ),
    "nothing-cached": Cause(
        "error",
        "the engine neither published nor hit the prompt when it came again",
        "{caching}; check that blocks are smaller than prompts",
    ),
    "hit-one-block-less": Cause(
        "info",
        "the engine hits one block less than it holds, as under EAGLE or MTP",
        "Worker(cache=CacheSettings(eagle=True)), --eagle",
    ),
    "hit-differs": Cause(
        "warning",
        "the engine hit {cached} tokens, the index predicted {predicted}",
        "see what events leave out: docs/guarantees.md, exact or an upper bound",
    ),
    "token-count-differs": Cause(
        "error",
        "the engine counts {counted} tokens in a prompt of {sent}",
        "give routers the tokens that the engine sees: /tokenize",
    ),
    "completion-failed": Cause(
        "warning",
        "the engine refuses the test prompt: {error}",
        "give --model, or leave the test out with --passive",
    ),
    "prompt-short": Cause(
        "error",
        "the prompt has {tokens} tokens, a block {block_size}: only whole blocks are cached",
        "nothing: prompts this short are never cached",
    ),
    "chat-template": Cause(
        "error",
        "the engine holds the prompt as a chat; as plain text it differs from token {position} on",
        "tokenize as the engine does: /tokenize with messages",
    ),
    "tokens-differ": Cause(
        "error",
        "your tokens differ from the engine's from token {position} on",
        "tokenize as the engine does: same tokenizer, same chat template, special tokens included",
    ),
    "namespace-differs": Cause(
        "error",
        "the same tokens are held under {other}",
        "ask with the same lora= and salt= that the requests have",
    ),
    "image-placeholders": Cause(
        "warning",
        "the match ends where the first image or other medium begins (token {position})",
        "ask with the extra_keys that the engine computes, or route by the text before it",
    ),
    "prompt-logprobs": Cause(
        "warning",
        "the request has {field}: vLLM then leaves its cache unread",
        "leave {field} out, or do not route such requests by prefix",
    ),
    "prompt-not-held": Cause(
        "info",
        "no rank holds a block of the prompt: {why}",
        "send it to the engine, then ask again",
    ),
}
"""Kinds of findings by their id, what is nearest to the cause first."""

_FIRST: Final = {
    "engine-unreachable": "could-not-look",
    "service-without-workers": "a-kvindex-service",
    "events-off": "what-the-engine-says-of-itself",
    "ports-collide": "ports",
    "topic-filtered": "streams",
    "all-well": "the-test-prompt",
    "prompt-short": "your-prompt",
}


def _sections() -> Iterator[tuple[str, str]]:
    section = ""
    for kind in CAUSES:
        section = _FIRST.get(kind, section)
        yield kind, section


SECTIONS: Final[dict[str, str]] = dict(_sections())
"""By id, the section of `docs/doctor.md` that has it."""


def words_for(engine: str) -> dict[str, str]:
    """Return what remedies call by name: flags of an engine, or of both if it is not known.

    Examples:
        >>> words_for("sglang")["report"]
        '--enable-cache-report'
    """
    flags = {"flag": _FLAG, "caching": _CACHING, "report": _REPORT}
    return {name: _flag(by_engine, engine) for name, by_engine in flags.items()}


def _flag(by_engine: dict[str, str], engine: str) -> str:
    if engine in by_engine:
        return by_engine[engine]
    return " (vLLM) or ".join(by_engine.values()) + " (SGLang)"
