"""Where the tokens of a prompt are from: the body, an engine's render or /tokenize, or nowhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, read_call
from kvindex.gateway.routing import Serving
from kvindex.gateway.tokens import Tokenizing, Tokens
from kvindex.gateway.upstream import Upstream, UpstreamError
from tests.gateway.models import folder

pytestmark = pytest.mark.unit

MESSAGES_OF_CHAT = [{"role": "user", "content": "Once"}]
VLLM, OTHER = Serving("a", "http://a", "vllm", "0.33.0"), Serving("b", "http://b", "vllm", "0.33.0")
CALL = read_call(CHAT, json.dumps({"messages": MESSAGES_OF_CHAT}).encode())
SGLANG = Serving("c", "http://c", "sglang", "0.5.23")


def local_tokens(path: Path) -> Any:
    from kvindex.gateway.local import LocalTokens

    return LocalTokens(folder(path))


class Engines(Upstream):
    """Engines that answer as scripted, by path: a status with JSON, or a reason to fail."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {path.replace("__", "/"): answer for path, answer in answers.items()}
        self.asked: list[tuple[str, str, Any]] = []

    async def ask(
        self, url: str, path: str, body: bytes = b"", headers: Any = (), **limits: Any
    ) -> tuple[int, bytes]:
        assert 0 < limits["within"] <= 2.0
        assert limits["most"] <= 16 << 20
        self.asked.append((url, path, json.loads(body)))
        answer = self.answers.get("render" if path.endswith("/render") else "tokenize", 404)
        if isinstance(answer, str):
            raise UpstreamError("it failed", reason=answer)
        if isinstance(answer, int):
            return answer, b"{}"
        return 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()


async def ask(
    engines: Engines, path: str, servings: Sequence[Serving] = (VLLM,), **fields: Any
) -> Tokens:
    call = read_call(path, json.dumps({"model": "m", **fields}).encode())
    return await Tokenizing(engines).tokens(call, servings)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4]]])
async def test_ids_in_the_body_are_the_tokens(prompt: Any) -> None:
    engines = Engines()
    assert await ask(engines, COMPLETIONS, prompt=prompt) == ([1, 2, 3], "ids")
    assert await ask(engines, EMBEDDINGS, input=prompt) == ([1, 2, 3], "ids")
    assert not engines.asked


async def test_a_chat_is_rendered_as_its_engine_sees_it() -> None:
    engines = Engines(render={"token_ids": [5, 6], "features": None})
    found = await ask(engines, CHAT, messages=MESSAGES_OF_CHAT, temperature=0.5)
    assert found == ([5, 6], "render")
    body = {"model": "m", "messages": MESSAGES_OF_CHAT, "temperature": 0.5}
    assert engines.asked == [("http://a", "/v1/chat/completions/render", body)]
    engines = Engines(render=[{"token_ids": [7]}, {"token_ids": [8]}])
    assert await ask(engines, COMPLETIONS, prompt=["Once", "Twice"]) == ([7], "render")


async def test_without_render_a_chat_is_tokenized_with_its_tools() -> None:
    engines = Engines(render=403, tokenize={"count": 2, "tokens": [5, 6]})
    fields: dict[str, Any] = {"messages": MESSAGES_OF_CHAT, "tools": [{"type": "function"}], "n": 2}
    assert await ask(engines, CHAT, **fields) == ([5, 6], "tokenize")
    asked = {"model": "m", "messages": MESSAGES_OF_CHAT, "tools": [{"type": "function"}]}
    assert engines.asked[-1] == ("http://a", "/tokenize", asked)


async def test_an_engine_of_sglang_is_asked_for_text_only() -> None:
    engines = Engines(tokenize={"tokens": [[9, 8], [7]]})
    assert await ask(engines, CHAT, [SGLANG], messages=MESSAGES_OF_CHAT) == (None, "no_source")
    assert await ask(engines, COMPLETIONS, [SGLANG], prompt="Once") == ([9, 8], "tokenize")
    assert engines.asked == [("http://c", "/tokenize", {"model": "m", "prompt": "Once"})]


@pytest.mark.parametrize(
    ("path", "fields", "messages"),
    [
        (MESSAGES, {"messages": MESSAGES_OF_CHAT}, MESSAGES_OF_CHAT),
        (
            MESSAGES,
            {"messages": MESSAGES_OF_CHAT, "system": "Be kind"},
            [{"role": "system", "content": "Be kind"}, *MESSAGES_OF_CHAT],
        ),
        (RESPONSES, {"input": "Once"}, MESSAGES_OF_CHAT),
    ],
)
async def test_other_apis_are_read_as_chats(path: str, fields: Any, messages: Any) -> None:
    engines = Engines(tokenize={"tokens": [5]})
    assert await ask(engines, path, **fields) == ([5], "tokenize")
    assert engines.asked == [("http://a", "/tokenize", {"model": "m", "messages": messages})]


async def test_what_is_no_text_has_no_tokens() -> None:
    engines = Engines()
    found = await ask(engines, RESPONSES, input="Once", previous_response_id="r")
    assert (found, engines.asked) == ((None, "not_text"), [])


@pytest.mark.parametrize("answer", [500, "reset", b"[]", b"{", {"tokens": [-1]}, {"tokens": "x"}])
async def test_an_engine_without_a_usable_answer_is_left_alone_for_a_while(answer: Any) -> None:
    engines = Engines(render=404, tokenize=answer)
    tokenizing = Tokenizing(engines)
    for _ in range(3):
        assert await tokenizing.tokens(CALL, [VLLM, OTHER]) in (
            (None, "refused"),
            (None, "no_source"),
        )
    assert len(engines.asked) == 4, "each of two engines for render and tokens, once"
    counted = tokenizing.statistics()
    assert counted["sources"] == {"refused": 1, "no_source": 2}
    assert counted["failures"]["status_404"] == 2


async def test_a_request_that_an_engine_refuses_does_not_silence_the_engine() -> None:
    engines = Engines(render=400, tokenize=400)
    tokenizing = Tokenizing(engines)
    for _ in range(2):
        assert await tokenizing.tokens(CALL, [VLLM]) == (None, "refused")
    assert len(engines.asked) == 4


async def test_engines_are_asked_in_turn() -> None:
    engines = Engines(render={"token_ids": [1]})
    tokenizing = Tokenizing(engines)
    for _ in range(4):
        await tokenizing.tokens(CALL, [VLLM, OTHER])
    assert [url for url, *_ in engines.asked] == ["http://b", "http://a"] * 2


async def test_without_engines_there_are_no_tokens() -> None:
    assert await ask(Engines(), CHAT, (), messages=MESSAGES_OF_CHAT) == (None, "no_source")


async def test_a_chat_is_encoded_here_once_its_engine_has_agreed(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    local = local_tokens(tmp_path)
    chat = {"messages": MESSAGES_OF_CHAT}
    expected = list(local.encode(local.prompt(chat), is_chat=True))
    engines = Engines(render={"token_ids": expected})
    tokenizing = Tokenizing(engines, local={"other": local, "": local})
    call = read_call(CHAT, json.dumps({"model": "m", **chat}).encode())
    found = [await tokenizing.tokens(call, [VLLM]) for _ in range(5)]
    assert [reason for _, reason in found] == ["render"] * 3 + ["local"] * 2
    assert all(list(ids or ()) == expected for ids, _ in found)
    long = read_call(
        CHAT, json.dumps({"messages": [{"role": "user", "content": "x " * 5000}]}).encode()
    )
    ids, reason = await tokenizing.tokens(long, [VLLM])
    assert (len(ids or ()) > 5000, reason) == (True, "local")
    own = read_call(COMPLETIONS, b'{"prompt": "Once", "add_special_tokens": false}')
    assert (await tokenizing.tokens(own, [VLLM])).reason == "render", "its engine's own way"


async def test_tokens_that_differ_from_the_engines_are_not_used(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    engines = Engines(render={"token_ids": [5]})
    tokenizing = Tokenizing(engines, local={"m": local_tokens(tmp_path)})
    call = read_call(CHAT, json.dumps({"model": "m", "messages": MESSAGES_OF_CHAT}).encode())
    for _ in range(5):
        assert await tokenizing.tokens(call, [VLLM]) == ([5], "render")
    counted = tokenizing.statistics()["local"]["m"]
    assert (counted["compared"], counted["differing"]) == (1, 1)


async def test_without_engines_that_answer_the_own_tokens_are_used(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    tokenizing = Tokenizing(Engines(), local={"m": local_tokens(tmp_path)})
    serving = Serving("a", "http://a", "sglang", models=("m",))
    call = read_call(CHAT, json.dumps({"model": "lora", "messages": MESSAGES_OF_CHAT}).encode())
    for _ in range(5):
        assert (await tokenizing.tokens(call, [serving])).reason == "local"
    image = {"messages": [{"content": [{"type": "image_url"}]}]}
    call = read_call(CHAT, json.dumps({"model": "m", **image}).encode())
    assert (await tokenizing.tokens(call, [serving])).reason == "no_source"
    assert tokenizing.statistics()["failures"] == {"template": 1}
