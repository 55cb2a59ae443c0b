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
) -> tuple[Any, str]:
    """Return the tokens, and where they are from."""
    call = read_call(path, json.dumps({"model": "m", **fields}).encode())
    found = await Tokenizing(engines).tokens(call, servings)
    return found.token_ids, found.reason


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
    assert await ask(engines, COMPLETIONS, [SGLANG], prompt="Once") == ([9, 8], "tokenize")
    assert engines.asked == [("http://c", "/tokenize", {"model": "m", "prompt": "Once"})]


async def test_an_engine_of_sglang_is_asked_with_all_that_it_reads_of_a_chat() -> None:
    engines = Engines(tokenize={"tokens": [5, 6]})
    read: dict[str, Any] = {
        "messages": MESSAGES_OF_CHAT,
        "tool_choice": "none",
        "reasoning_effort": "low",
    }
    left_out: dict[str, Any] = {
        "temperature": 0.5,
        "cache_salt": "s",
        "stream": True,
        "not_a_field": 1,
    }
    assert await ask(engines, CHAT, [SGLANG], **read, **left_out) == ([5, 6], "tokenize")
    assert engines.asked == [("http://c", "/tokenize", {"model": "m", **read})]


async def test_what_changes_a_chat_is_passed_on_as_vllm_reads_it() -> None:
    engines = Engines(render=404, tokenize={"tokens": [5, 6]})
    kept: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    await ask(
        engines,
        CHAT,
        messages=MESSAGES_OF_CHAT,
        add_special_tokens=True,
        documents=[{"text": "d"}],
        reasoning_effort="none",
        chat_template_kwargs={"a": 1},
        tool_choice="auto",
        **kept,
    )
    options: dict[str, Any] = {"a": 1, "enable_thinking": False, "reasoning_effort": "none"}
    options["documents"] = [{"text": "d"}]
    asked = {"model": "m", "messages": MESSAGES_OF_CHAT, "add_special_tokens": True, **kept}
    assert engines.asked[-1][2] == {**asked, "chat_template_kwargs": options}


async def test_a_shortened_prompt_has_the_tokens_that_its_engine_keeps() -> None:
    engines = Engines(render=404, tokenize={"tokens": [5, 6, 7], "max_model_len": 100})
    text: dict[str, Any] = {"prompt": "Once", "truncate_prompt_tokens": 2}
    assert await ask(engines, COMPLETIONS, **text, truncation_side="left") == ([6, 7], "tokenize")
    assert await ask(engines, COMPLETIONS, **text) == (None, "truncated")
    ids: dict[str, Any] = {
        "prompt": [5, 6, 7],
        "truncate_prompt_tokens": 2,
        "truncation_side": "right",
    }
    assert await ask(engines, COMPLETIONS, **ids) == ([5, 6], "ids")
    everything: dict[str, Any] = {"prompt": "Once", "truncate_prompt_tokens": -1}
    assert await ask(engines, COMPLETIONS, **everything) == ([5, 6, 7], "tokenize")


async def test_system_messages_in_between_are_asked_for_again_in_front() -> None:
    class Strict(Engines):
        """Its template refuses system messages that are not the first."""

        async def ask(
            self, url: str, path: str, body: bytes = b"", *args: Any, **limits: Any
        ) -> Any:
            await super().ask(url, path, body, *args, **limits)
            roles = [message["role"] for message in json.loads(body).get("messages", ())]
            refuses = "system" in roles[1:] or path.endswith("/render")
            return (400, b"{}") if refuses else (200, b'{"tokens": [5]}')

    engines = Strict()
    turns = [*MESSAGES_OF_CHAT, {"role": "system", "content": "Now"}]
    assert await ask(engines, MESSAGES, messages=turns) == ([5], "tokenize")
    assert engines.asked[-1][2]["messages"] == [
        {"role": "system", "content": "Now"},
        *MESSAGES_OF_CHAT,
    ]


class Thinking(Engines):
    """Engines whose template renders each effort in its own way, but for some."""

    def __init__(self, same: str = "", refused: str = "") -> None:
        super().__init__()
        self.same, self.refused = same, refused

    async def ask(self, url: str, path: str, body: bytes = b"", *args: Any, **limits: Any) -> Any:
        await super().ask(url, path, body, *args, **limits)
        effort = json.loads(body).get("chat_template_kwargs", {}).get("reasoning_effort", "")
        if path.endswith("/render") or (effort and effort == self.refused):
            return 400, b"{}"
        shown = "none" if effort == self.same else effort
        return 200, json.dumps({"tokens": list(shown.encode())}).encode()


@pytest.mark.parametrize(
    ("engines", "version", "effort"),
    [
        pytest.param(Thinking(), "0.32.0", "none", id="before vLLM tried"),
        pytest.param(Thinking(same="max"), "0.32.0", "none", id="before vLLM tried, taken for max"),
        pytest.param(Thinking(), "0.33.0", "none", id="a way of its own"),
        pytest.param(Thinking(same="max"), "0.33.0", "low", id="taken for another"),
        pytest.param(Thinking(refused="none"), "0.33.0", "low", id="refused"),
    ],
)
async def test_thinking_is_off_by_the_effort_that_vllm_finds_out(
    engines: Thinking, version: str, effort: str
) -> None:
    serving = Serving("a", "http://a", "vllm", version)
    tokenizing = Tokenizing(engines)
    fields = {"messages": MESSAGES_OF_CHAT, "thinking": {"type": "disabled"}}
    call = read_call(MESSAGES, json.dumps(fields).encode())
    for _ in range(2):
        found = await tokenizing.tokens(call, [serving])
        assert bytes(found.token_ids or ()).decode() == effort
    tried = [body for *_, body in engines.asked if body["messages"][0]["content"] == "Hi"]
    assert len(tried) == (6 if version == "0.33.0" else 0), "once for each effort"


async def test_an_effort_of_gpt_oss_is_known_to_its_engine_only() -> None:
    engines = Engines(render=404, tokenize={"tokens": [200006, 17360]})
    chat: dict[str, Any] = {"messages": MESSAGES_OF_CHAT}
    assert await ask(engines, CHAT, **chat, reasoning_effort="low") == (None, "reasoning_effort")
    assert (await ask(engines, CHAT, **chat))[1] == "tokenize"


async def test_further_prompts_of_a_request_are_load() -> None:
    call = read_call(COMPLETIONS, json.dumps({"prompt": [[1, 2], [3, 4, 5]]}).encode())
    found = await Tokenizing(Engines()).tokens(call, [VLLM])
    assert (found.token_ids, found.length(call)) == ([1, 2], 5)
    call = read_call(COMPLETIONS, json.dumps({"prompt": ["Once", "x" * 400]}).encode())
    found = await Tokenizing(Engines(tokenize={"tokens": [1, 2]})).tokens(call, [VLLM])
    assert found.length(call) == 2 + 200, "as an estimate, where it is a text"


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
    rendered, asked = engines.asked
    assert rendered == ("http://a", f"{path}/render", {"model": "m", **fields})
    assert asked[:2] == ("http://a", "/tokenize")
    special = {"add_special_tokens": True} if path == RESPONSES else {}
    assert asked[2] == {"model": "m", "messages": messages, **special}


async def test_what_is_no_text_has_no_tokens() -> None:
    engines = Engines()
    found = await ask(engines, RESPONSES, input="Once", previous_response_id="r")
    assert (found, engines.asked) == ((None, "previous_response_id"), [])


@pytest.mark.parametrize("answer", [500, "reset", b"[]", b"{", {"tokens": [-1]}, {"tokens": "x"}])
async def test_an_engine_without_a_usable_answer_is_left_alone_for_a_while(answer: Any) -> None:
    engines = Engines(render=404, tokenize=answer)
    tokenizing = Tokenizing(engines)
    for _ in range(3):
        found = await tokenizing.tokens(CALL, [VLLM, OTHER])
        assert found.token_ids is None
    assert len(engines.asked) == 4, "each of two engines for render and tokens, once"
    counted = tokenizing.statistics()
    assert counted["sources"] == {"refused": 1, "no_source": 2}
    assert counted["failures"]["status_404"] == 2


async def test_a_request_that_an_engine_refuses_does_not_silence_the_engine() -> None:
    engines = Engines(render=400, tokenize=400)
    tokenizing = Tokenizing(engines)
    for _ in range(2):
        assert await tokenizing.tokens(CALL, [VLLM]) == Tokens(None, "refused")
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
    assert [tokens.reason for tokens in found] == ["render"] * 3 + ["local"] * 2
    assert all(list(tokens.token_ids or ()) == expected for tokens in found)
    long = read_call(
        CHAT, json.dumps({"messages": [{"role": "user", "content": "x " * 5000}]}).encode()
    )
    tokens = await tokenizing.tokens(long, [VLLM])
    assert (tokens.length(long) > 5000, tokens.reason) == (True, "local")
    own = read_call(COMPLETIONS, b'{"prompt": "Once", "add_special_tokens": false}')
    assert (await tokenizing.tokens(own, [VLLM])).reason == "render", "its engine's own way"


async def test_tokens_that_differ_from_the_engines_are_not_used(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    engines = Engines(render={"token_ids": [5]})
    tokenizing = Tokenizing(engines, local={"m": local_tokens(tmp_path)})
    call = read_call(CHAT, json.dumps({"model": "m", "messages": MESSAGES_OF_CHAT}).encode())
    for _ in range(5):
        assert await tokenizing.tokens(call, [VLLM]) == Tokens([5], "render")
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
    assert (await tokenizing.tokens(call, [serving])).reason == "media"
