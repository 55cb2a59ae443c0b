"""Every kind of finding: how bad it is, its sentence and its remedy, as data."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import msgspec

Severity = Literal["error", "warning", "info"]
"""error: hits are (almost) none for this. warning: hits are lost for it. info: a hint."""


class Cause(msgspec.Struct, frozen=True):
    """One kind of finding; `what` and `remedy` have places for the evidence.

    `blind` findings mean that a target could not be examined.
    """

    severity: Severity
    what: str
    remedy: str
    blind: bool = False


_error = partial(Cause, "error")
_warning = partial(Cause, "warning")
_info = partial(Cause, "info")

_ZMQ: Final = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"'
_WORDS: Final = {
    "flag": {
        "vllm": f"--kv-events-config '{{\"enable_kv_cache_events\": true, {_ZMQ}}}'",
        "sglang": f"--kv-events-config '{{{_ZMQ}}}'",
    },
    "caching": {
        "vllm": "leave out --no-enable-prefix-caching",
        "sglang": "leave out --disable-radix-cache",
    },
    "report": {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"},
}

# Within each section, what is nearest to the cause stands first.
_COULD_NOT_LOOK: Final = {
    "engine-unreachable": _error(
        "the engine does not answer over HTTP: {error}",
        "check the URL, and that the engine has started",
        blind=True,
    ),
    "tls-failed": _error(
        "no TLS connection to the engine: {error}",
        "name the file of the authority that its certificate is from: --cacert FILE; write http:// "
        "if it has no TLS",
        blind=True,
    ),
    "engine-denied": _error(
        "the engine refuses to answer without its API key",
        "give the key in KVINDEX_API_KEY, or as --api-key-file",
        blind=True,
    ),
    "endpoint-unreachable": _error(
        "{endpoint} cannot be reached: {error}",
        "check the host's name, routes and firewalls between here and there",
        blind=True,
    ),
    "sources-unknown": _warning(
        "the engine does not report where it publishes",
        "name its endpoints: kvindex doctor NAME=tcp://HOST:5557,replay=tcp://HOST:5657 --engine "
        "{url}",
        blind=True,
    ),
}
_A_KVINDEX_SERVICE: Final = {
    "service-denied": _error(
        "this kvindex {service} says how it stands to its operators only",
        "give the doctor an operator's token, of the gateway's --admin-token-file, in "
        "KVINDEX_API_KEY or as --api-key-file; without that file, ask on the gateway's machine",
        blind=True,
    ),
    "gateway-not-ready": _error(
        "the gateway is not ready (/ready answers {status}): no engine would answer, or it is "
        "ending",
        "see the other findings: each engine is missing, silent, drained or away",
    ),
    "service-without-workers": _error(
        "this kvindex {service} has no workers",
        "name its engines, or have them found (--dns, --k8s-preset) or, by kvindex serve, "
        "registered (POST /register)",
    ),
    "service-rank-not-live": _error(
        "the kvindex {service} is not current for {rank}: {reason}",
        "examine that engine itself: kvindex doctor http://ENGINE:8000",
    ),
    "worker-ejected": _warning(
        "{worker} has failed and gets no requests for {seconds} s: {reason}",
        "look at its log, and examine it: kvindex doctor http://{worker}",
    ),
    "worker-away": _warning(
        "{worker} gets no requests: {reason}", "wake it up (/wake_up), or look at its log"
    ),
    "worker-drained": _warning(
        "{worker} gets no requests: {reason}",
        "once it is to serve again: POST /admin/undrain?worker={worker}",
    ),
    "tokens-unknown": _warning(
        "{unknown} of {prompts} prompts went by load alone, since no engine gave their tokens: "
        "{reasons}",
        "give the gateway the model's tokenizer (--tokenizer), or let engines answer (vLLM: "
        "--enable-scale-out)",
    ),
    "hits-unexpected": _warning(
        "{rank} and the index disagree about its cache: {suspicion}",
        "examine that engine itself: kvindex doctor http://ENGINE:8000",
    ),
    "requests-shed": _warning(
        "{shed} of {requests} requests found no room: {reasons}",
        "add engines, or raise --max-open-requests, --max-queued-tokens, --wait-within or "
        "--max-waiting",
    ),
    "bookings-expired": _warning(
        "{expired} of {ended} bookings expired before their requests ended ({late} reports came "
        "after that)",
        "an end was not noticed: look at the access log for requests of ten minutes, and report it",
    ),
    "pair-never-transfers": _error(
        "{apart} prompts were prefilled apart, and by their metrics the engines that decode have "
        "fetched none since they started: each was computed twice ({decoders})",
        "give P and D the same --kv-transfer-config but for kv_role, and see their logs for NIXL "
        "and its side channel: docs/how-to/disaggregation.md",
    ),
    "tokens-refused": _info(
        "of the questions for prompts' tokens {failed} had no answer, others had: {reasons}",
        "nothing; status_403 is a vLLM without --enable-scale-out",
    ),
    "prompts-by-load": _info(
        "{unknown} of {prompts} prompts went by load alone: {reasons}",
        "nothing, or change what is sent: docs/gateway.md, where tokens come from",
    ),
    "service-examined": _info(
        "this is kvindex {service}: it was asked how its engines stand, they were not examined",
        "examine an engine itself: kvindex doctor http://ENGINE:8000",
    ),
}
_WHAT_THE_ENGINE_REPORTS: Final = {
    "events-off": _error("the engine publishes no KV events", "start it with {flag}"),
    "ranks-differ": _error(
        "the engine has the ranks {stated}, you gave {given}",
        "give every rank that the engine has, and no other: other engines own the other ports",
    ),
    "endpoints-differ": _error(
        "the engine publishes at port {stated[port]} and replays at {stated[replay]}; you gave "
        "{given[port]} and {given[replay]}",
        "give the ports that the engine states; where a proxy maps ports, check what it maps "
        "them to",
    ),
    "publisher-not-zmq": _error(
        'its events go to the publisher "{publisher}", which no subscriber here can receive',
        "start it with {flag}",
    ),
    "prefix-caching-off": _error(
        "prefix caching is off: nothing is cached, so nothing can be hit", "{caching}"
    ),
    "block-exceeds-prompts": _error(
        "a block has {block_size} tokens, the longest request {max_model_len}: fewer than two "
        "blocks fit, and only whole blocks are cached",
        "use a smaller block (--block-size, --page-size, or another model's layout)",
    ),
    "block-large": _warning(
        "a block has {block_size} tokens: shorter prompts are never cached",
        "send longer shared prefixes, or use a smaller block where the model allows it",
    ),
    "block-size-differs": _warning(
        "the engine states blocks of {stated} tokens, its events have {received}",
        "have routers read the size from the events, as kvindex does",
    ),
    "block-size-assumed": _error(
        "your router assumes {assumed} tokens a block, the engine's events have {received}",
        "have the router read the size from the events, or set {received}",
    ),
    "cache-small": _warning(
        "the cache holds {cache_tokens} tokens, less than two of the longest requests "
        "({max_model_len})",
        "give it more memory, offload to the CPU, or lower --max-model-len; with vLLM before "
        "0.20 KV events switch off the hybrid cache manager: upgrade",
    ),
    "evicted-before-reuse": _warning(
        "{again} of {stored} stored blocks had been evicted shortly before: the cache is too "
        "small for what is reused",
        "more memory, offloading, or fewer ranks for each prefix",
    ),
    "version-known-bug": _warning(
        "{engine_name} {version}: {bug}", "use {engine_name} {since} or later"
    ),
    "dp-behind-one-port": _info(
        "{ranks} data-parallel ranks share one HTTP port: the engine chooses the rank, not you",
        "send the header X-data-parallel-rank (SGLang: the field data_parallel_rank), or give "
        "each rank a port of its own",
    ),
    "decode-only": _warning(
        "this engine only decodes: prompts are computed, and cached, by prefill engines",
        "route prompts by what the prefill engines hold, or start it with "
        "--disaggregation-decode-enable-radix-cache",
    ),
    "speculates-bigrams": _info(
        "speculative decoding ({algorithm}): a block's hash covers one token more",
        "ask with whole pages of tokens: see docs/how-to/sglang.md",
    ),
    "offload-unseen": _warning(
        "the engine hit {external} tokens outside its GPU, and no event names a block there",
        "have the connector announce its blocks (LMCache does from 0.5.6 on), or count these hits "
        "as unknown; if a prefill engine sent them: nothing, they are announced on the GPU",
    ),
    "cached-tokens-unreported": _info(
        "answers do not report how many tokens were cached", "start the engine with {report}"
    ),
}
_PORTS: Final = {
    "ports-collide": _error(
        "{endpoint} is to publish for one rank and to replay for another",
        "keep both ports at least as far apart as there are ranks: 5557 and 5657",
    ),
    "publisher-connects": _error(
        "nothing listens at {endpoint}: the engine connects to it, since it names a host",
        'set "endpoint": "tcp://*:PORT" in the engine, or subscribe with bind '
        "(Worker(bind=True), NAME=ENDPOINT,bind)",
    ),
    "subscriber-dials": _error(
        "nothing listens at {endpoint}: a subscriber of this machine dials it, no engine does",
        "check that events are on ({flag}), and the port (+ the rank's number)",
    ),
    "publisher-refused": _error(
        "nothing listens at {endpoint}",
        "check that events are on ({flag}), the port (+ the rank's number), and that the "
        "endpoint has a * for its host: with a concrete host the engine connects instead of "
        "listening",
    ),
    "port-not-zmq": _error(
        "at {endpoint} {protocol} answers, not ZeroMQ",
        "give the port of the events (5557 by default), not that of another server",
    ),
    "port-reset": _error(
        "{endpoint} accepts connections and drops them at once",
        "connect to the pod itself: exclude the port from the sidecar or proxy, and use no "
        "Service that balances",
    ),
    "port-silent": _error(
        "{endpoint} accepts connections and sends nothing",
        "look for a stuck process, or a proxy in front of a port where nothing listens",
    ),
    "port-encrypted": _error(
        "{endpoint} demands {mechanism}", "give the publisher's key: Worker(curve=...)"
    ),
    "publisher-wrong-socket": _error(
        "{endpoint} is no publisher's socket (its type: {socket_type})",
        "give the events' port; a ROUTER is a replay socket: exchange the two if you gave both",
    ),
    "replay-wrong-socket": _error(
        "{endpoint}, given for replay, is no ROUTER (its type: {socket_type})",
        "give the replay endpoint; is another rank's publisher there?",
    ),
    "replay-refused": _warning(
        "nothing listens at the replay endpoint {endpoint}",
        'set "replay_endpoint" in the engine, and keep its port away from the publishers\'',
    ),
    "replay-silent": _warning(
        "the replay endpoint {endpoint} does not answer",
        "restart the engine; behind a proxy, connect to the pod itself",
    ),
    "replay-of-another": _error(
        "{endpoint} replays another publisher's batches: batch {seq}, received live, {there}",
        "give the replay endpoint of this rank's own publisher",
    ),
    "replay-not-given": _warning(
        "the engine replays at port {port}, and you gave no replay endpoint: what was published "
        "before, and each gap, stays unknown",
        "give it to the router too: NAME=ENDPOINT,replay=tcp://HOST:{port}",
    ),
    "replay-not-named": _warning(
        "no replay endpoint was named: what was published before, and each gap, stays unknown",
        "name it, to the router too: NAME=ENDPOINT,replay=tcp://HOST:PORT; --engine URL asks the "
        "engine whether it has one",
    ),
    "replay-missing": _warning(
        "the engine has no replay endpoint: what was published before, and each gap, stays unknown",
        'set "replay_endpoint": "tcp://*:5657" in the engine, and give it to the router',
    ),
}
_STREAMS: Final = {
    "topic-filtered": _error(
        'the filter "{filter}" lets no message through; topics received: {topics}',
        'subscribe with topic "", or set "topic" in the engine',
    ),
    "topic-names-another": _warning(
        "the topic {topic} names the model {named}, the engine serves {models}",
        "use one name in the topic and in --served-model-name: routers that read the topic look "
        "under the wrong one",
    ),
    "silent-while-serving": _error(
        "the engine computed {prompt_tokens} prompt tokens meanwhile, and published nothing",
        "check that the publisher is zmq, and the model: hybrid models publish nothing on some "
        "versions",
    ),
    "replay-running": _info(
        "its replay is still running: {done} of at least {known} batches came so far",
        "examine it again later, or give it more time (Limits.replay)",
    ),
    "stream-not-live": _error(
        "the stream is {state}: {reason}",
        "look at the engine's log and what stands between; docs/guarantees.md explains the states",
    ),
    "stream-incomplete": _warning(
        "batches are missing that replay did not return ({losses} losses): the index has only a "
        "part of the cache",
        "set replay_endpoint, raise buffer_steps, or restart warm (docs/how-to/warm-restart.md)",
    ),
    "numbers-jump": _warning(
        "{missing} numbers are missing in the live stream without a message",
        "set replay_endpoint; vLLM up to 0.10.1 with sha256 hashes loses every batch: upgrade",
    ),
    "undecodable": _error(
        "{failures} messages cannot be decoded",
        "record some (kvindex record) and report them: this engine's version may be new to kvindex",
    ),
    "events-unknown": _warning(
        "events of kinds that kvindex does not know arrived ({tags}). They may have taken blocks "
        "away: answers are upper bounds until the engine clears its cache or restarts",
        "upgrade kvindex, or report these events",
    ),
    "blocks-left-out": _warning(
        "{count} blocks have no place in the index: {reasons}",
        "see docs/faq.md: most often batches before them were lost, or a limit is too low",
    ),
    "windows-only": _warning(
        "no group of this model has full attention ({kinds}): its events leave out where most "
        "blocks belong, and the index holds {blocks}",
        "run vLLM 0.29 or later with its default hash and no PYTHONHASHSEED, or route this model "
        "by load: docs/guarantees.md, exact or a bound",
    ),
    "several-publishers": _error(
        "several publishers send at {endpoint}",
        "give each rank its own address: no Service that balances, and no relay of several",
    ),
    "prompts-diverge": _info(
        "{prompts} of {all} prompts part after their first {tokens} tokens",
        "if prompts should share more, move what changes there (a time, an id, tools in another "
        "order) to the end",
    ),
    "hash-seeds-differ": _info(
        "the same tokens have different hashes on {ranks}",
        "kvindex is immune; consumers that go by the engine's hash need one PYTHONHASHSEED",
    ),
    "setting-untold": _warning(
        "{advice}", "give it as CacheSettings (docs/guarantees.md, exact or an upper bound)"
    ),
}
_THE_TEST_PROMPT: Final = {
    "all-well": _info("all is well: {seen}", "nothing"),
    "engine-never-hits": _error(
        "the engine stored the prompt and did not hit it when it was sent again",
        "hybrid or Mamba models: --mamba-cache-mode, or another version; otherwise do not route "
        "this model by prefix",
    ),
    "rank-not-kept": _error(
        "the prompt was sent again and another of {ranks} ranks computed it, though rank "
        "{asked_for} was asked for",
        "give each rank an HTTP port of its own (vLLM: --data-parallel-external-lb), or a "
        "version that honours X-data-parallel-rank",
    ),
    "index-misses": _error(
        "the engine stored the prompt and hit it, but the index does not find it",
        "compare tokens, LoRA, salt and topic filter: kvindex match --explain",
    ),
    "index-and-engine-miss": _error(
        "the engine reported blocks of this prompt, but neither the index nor the engine finds it",
        "the cache evicts at once, or its events have no place: see the other findings",
    ),
    "live-stream-mute": _warning(
        "the prompt arrived by replay only: live messages do not arrive",
        "look at what stands between: a proxy that drops, a full queue (hwm), a filter",
    ),
    "live-stream-mute-no-hit": _error(
        "the prompt arrived by replay only, and the engine did not hit it when it was sent again",
        "both: look at what drops live messages, and at the model (--mamba-cache-mode)",
    ),
    "caches-unpublished": _error(
        "the engine hit the prompt when it was sent again, but published nothing of it",
        "check publisher and ports; some versions publish nothing for hybrid models",
    ),
    "nothing-cached": _error(
        "the engine neither published nor hit the prompt when it was sent again",
        "{caching}; check that blocks are smaller than prompts",
    ),
    "hit-one-block-less": _info(
        "the engine hits one block less than it holds, as under EAGLE or MTP",
        "Worker(cache=CacheSettings(eagle=True)), --eagle",
    ),
    "hit-differs": _warning(
        "the engine hit {cached} tokens, the index predicted {predicted}",
        "see what events leave out: docs/guarantees.md, exact or an upper bound",
    ),
    "token-count-differs": _error(
        "the engine counts {counted} tokens in a prompt of {sent}",
        "give routers the tokens that the engine sees: /tokenize",
    ),
    "completion-failed": _warning(
        "the engine refuses the test prompt: {error}",
        "give --model, or leave the test out with --passive",
    ),
}
_YOUR_PROMPT: Final = {
    "prompt-short": _error(
        "the prompt has {tokens} tokens, a block {block_size}: only whole blocks are cached",
        "nothing: prompts this short are never cached",
    ),
    "chat-template": _error(
        "the engine holds the prompt as a chat; as plain text it differs from token {position} on",
        "tokenize as the engine does: /tokenize with messages",
    ),
    "tokens-differ": _error(
        "your tokens differ from the engine's from token {position} on",
        "tokenize as the engine does: same tokenizer, same chat template, special tokens included",
    ),
    "namespace-differs": _error(
        "the same tokens are held under {other}",
        "ask with the same lora= and salt= that the requests have",
    ),
    "image-placeholders": _warning(
        "the match ends where the first image or other medium begins (token {position})",
        "ask with the extra_keys that the engine computes, or route by the text before it",
    ),
    "prompt-logprobs": _warning(
        "the request has {field}: vLLM then leaves its cache unread",
        "leave {field} out, or do not route such requests by prefix",
    ),
    "prompt-not-held": _info(
        "no rank holds a block of the prompt: {why}", "send it to the engine, then ask again"
    ),
}
_BY_SECTION: Final[dict[str, dict[str, Cause]]] = {
    "could-not-look": _COULD_NOT_LOOK,
    "a-kvindex-service": _A_KVINDEX_SERVICE,
    "what-the-engine-reports": _WHAT_THE_ENGINE_REPORTS,
    "ports": _PORTS,
    "streams": _STREAMS,
    "the-test-prompt": _THE_TEST_PROMPT,
    "your-prompt": _YOUR_PROMPT,
}

CAUSES: Final = {kind: cause for causes in _BY_SECTION.values() for kind, cause in causes.items()}
"""Kinds of findings by their id."""

SECTIONS: Final = {kind: section for section, causes in _BY_SECTION.items() for kind in causes}
"""By id, the section of `docs/doctor.md` that has it."""


def words_for(engine: str) -> dict[str, str]:
    """Return what remedies call by name: flags of an engine, or of both if it is not known.

    Examples:
        >>> words_for("sglang")["report"]
        '--enable-cache-report'
    """
    return {
        name: by_engine.get(engine) or " (vLLM) or ".join(by_engine.values()) + " (SGLang)"
        for name, by_engine in _WORDS.items()
    }
