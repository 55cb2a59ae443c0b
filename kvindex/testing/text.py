"""The tokenizer and the chat template of the fake engine: one token for each byte."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvindex.wire.errors import ConfigurationError

__all__ = ["chat_images", "chat_tokens", "text_of", "text_tokens"]

_SPECIAL: Final = ("<begin>", "<end>", "<system>", "<user>", "<assistant>", "<tool>", "<image>")
_ID: Final = {name: 256 + number for number, name in enumerate(_SPECIAL)}


def text_tokens(text: str, *, begin: bool = True) -> list[int]:
    """Return a text's token ids: 256 (the beginning), then each byte of its UTF-8.

    Args:
        text: any text.
        begin: False leaves out the beginning, as `add_special_tokens: false` does.

    Examples:
        >>> text_tokens("hi")
        [256, 104, 105]
    """
    return [_ID["<begin>"]] * begin + list(text.encode("utf-8", "surrogatepass"))


def chat_tokens(messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> list[int]:
    """Return a chat's token ids: each message between its role's token and the end's.

    An image is one placeholder token, whatever it shows.

    Args:
        messages: as in a request to `/v1/chat/completions`.
        answer: whether the assistant's token follows, as `add_generation_prompt` has it.

    Raises:
        ConfigurationError: a message has no role that is known, or no content.

    Examples:
        >>> chat_tokens([{"role": "user", "content": "hi"}])
        [256, 259, 104, 105, 257, 260]
    """
    tokens = [_ID["<begin>"]]
    for message in messages:
        role = f"<{message.get('role')}>" if isinstance(message, Mapping) else ""
        if role not in ("<system>", "<user>", "<assistant>", "<tool>"):
            raise ConfigurationError(f"a message needs a role that is known, not {message!r:.80}")
        tokens += [_ID[role], *_content(message.get("content")), _ID["<end>"]]
    return tokens + [_ID["<assistant>"]] * answer


def chat_images(messages: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return, for each image of a chat, where its placeholder stands and a digest of the image.

    Examples:
        >>> list(chat_images([{"role": "user", "content": [{"type": "image_url"}]}]))
        [2]
    """
    places = [at for at, token in enumerate(chat_tokens(messages)) if token == _ID["<image>"]]
    images = (
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if not _is_text(part)
    )
    digests = (f"{zlib.crc32(repr(image).encode()):08x}" for image in images)
    return dict(zip(places, digests, strict=True))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of token ids; special tokens by their names.

    Examples:
        >>> text_of([256, 259, 104, 105, 257])
        '<begin><user>hi<end>'
    """
    pieces = (
        bytes([token])
        if 0 <= token < 256
        else (_SPECIAL[token - 256] if 256 <= token < 256 + len(_SPECIAL) else "<unknown>").encode()
        for token in token_ids
    )
    return b"".join(pieces).decode("utf-8", "replace")


def _content(content: object) -> list[int]:
    if isinstance(content, str):
        return text_tokens(content, begin=False)
    if not isinstance(content, list):
        raise ConfigurationError(f"a message's content is text or a list, not {content!r:.80}")
    tokens: list[int] = []
    for part in content:
        if _is_text(part):
            tokens += text_tokens(part["text"], begin=False)
        else:
            tokens.append(_ID["<image>"])
    return tokens


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
