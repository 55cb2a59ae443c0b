"""A prompt of the user's, as the engine sees it, against what is indexed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.tools.doctor import Diagnosis, UserPrompt
from kvindex.wire.web import Web
from tests.tools.doctor.doctored import LIVE, ids, look_at, the

pytestmark = pytest.mark.e2e

TEXT = "Tell me of the ships that pass in the night, please."
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(block_size=4, num_blocks=2_000) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpEngine]:
    with HttpEngine(engine, options=HttpOptions(loras=("tone",))) as server:
        yield server


def post(server: HttpEngine, path: str, body: dict[str, Any]) -> Any:
    answer = Web(server.url).post(path, json.dumps({"max_tokens": 1, **body}).encode(), 10.0)
    assert answer.status == 200, answer.body
    return answer.json()


def asked(server: HttpEngine, **prompt: Any) -> Diagnosis:
    return look_at(server.url, passive=True, limits=LIVE, prompt=UserPrompt(**prompt))


def test_a_prompt_that_is_held_as_a_chat_differs_as_plain_text(server: HttpEngine) -> None:
    post(server, "/v1/chat/completions", {"messages": CHAT})
    report = asked(server, text=TEXT)
    assert ids(report) == ["chat-template"]
    assert the(report, "chat-template").evidence["position"] == 1
    assert "52 of" in report.notes[0] or "a chat" in report.notes[0]


def test_a_prompt_that_is_held_as_sent_gives_notes_only(server: HttpEngine) -> None:
    post(server, "/v1/completions", {"prompt": TEXT})
    report = asked(server, text=TEXT)
    assert ids(report) == []
    assert "52 of 53 tokens" in report.notes[0]


def test_tokens_that_differ_from_the_engines_name_the_place(server: HttpEngine) -> None:
    tokens = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    post(server, "/v1/completions", {"prompt": TEXT})
    assert ids(asked(server, text=TEXT, tokens=tokens)) == []
    other = [*tokens[:10], 7, *tokens[11:]]
    seen = the(asked(server, text=TEXT, tokens=other), "tokens-differ").evidence
    assert (seen["position"], seen["yours"][0], seen["engines"][0]) == (10, 7, tokens[10])
    missing = asked(server, text=TEXT, tokens=tokens[1:])
    assert ids(missing) == ["tokens-differ", "prompt-not-held"]


def test_a_prompt_below_one_block_is_never_cached(server: HttpEngine) -> None:
    post(server, "/v1/completions", {"prompt": TEXT})
    report = asked(server, tokens=[1, 2, 3])
    assert the(report, "prompt-short").evidence == {"tokens": 3, "block_size": 4}


@pytest.mark.parametrize("sent", [{"cache_salt": "s"}, {"model": "tone"}])
def test_a_prompt_in_another_namespace_is_named(server: HttpEngine, sent: dict[str, str]) -> None:
    post(server, "/v1/completions", {"prompt": TEXT, **sent})
    tokens = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    assert ids(asked(server, tokens=tokens)) == ["namespace-differs"]
    held = asked(server, tokens=tokens, lora=sent.get("model"), salt=sent.get("cache_salt"))
    assert ids(held) == []


def test_a_match_that_ends_at_an_image_is_a_finding_if_rendered(engine: FakeEngine) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,x"}}
    content = [{"type": "text", "text": TEXT}, picture, {"type": "text", "text": TEXT}]
    body = {"messages": [{"role": "user", "content": content}]}
    with HttpEngine(engine, options=HttpOptions(render=True)) as server:
        post(server, "/v1/chat/completions", body)
        report = asked(server, body=body)
    assert ids(report) == ["image-placeholders"]
    assert the(report, "image-placeholders").evidence["matched"] == 52


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": TEXT, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": TEXT, "echo": True, "logprobs": 0}, "echo with logprobs"),
        ({"prompt": TEXT, "echo": True}, ""),
        ({"prompt": TEXT, "logprobs": 1}, ""),
        (
            {"prompt": TEXT, "prompt_logprobs": None, "echo": True, "logprobs": 1},
            "echo with logprobs",
        ),
        ({"messages": CHAT, "echo": True}, "echo"),
        ({"messages": CHAT, "echo": True, "top_logprobs": None}, ""),
        ({"messages": CHAT, "echo": False, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": CHAT, "logprobs": True}, ""),
    ],
)
def test_fields_against_the_cache_are_found(
    server: HttpEngine, fields: dict[str, Any], named: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    usages = [post(server, path, fields)["usage"] for _ in range(2)]
    assert (usages[1]["prompt_tokens_details"]["cached_tokens"] == 0) is bool(named)
    report = asked(server, body=fields)
    assert ids(report) == ["prompt-logprobs"] * bool(named)
    if named:
        assert the(report, "prompt-logprobs").evidence["field"] == named


def test_a_prompt_that_nobody_holds_is_no_fault(server: HttpEngine) -> None:
    report = asked(server, text=TEXT)
    assert ids(report) == ["prompt-not-held"]
    assert report.exit_code == 0


def test_a_prompt_of_token_ids_needs_no_tokenizer(server: HttpEngine) -> None:
    body = {"prompt": [1, 2, 3, 4, 5, 6]}
    post(server, "/v1/completions", body)
    assert "4 of 6 tokens" in asked(server, body=body).notes[0]
