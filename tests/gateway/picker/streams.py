"""A gateway's side of the picker's protocol, and a picker as a process in front of fake engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

from kvindex.gateway.picker import messages
from kvindex.testing import HttpEngine
from tests.live import PATIENCE
from tests.tools.commands import Running, http_engines, started

STREAMED, BUFFERED, DUPLEX = 1, 2, 4  # ProcessingMode.BodySendMode
CHAT = "/v1/chat/completions"


class Picker:
    """A picker, its engines, and a channel to it."""

    def __init__(self, process: Running, printed: Sequence[str], urls: Sequence[str]) -> None:
        self.process, self.printed = process, printed
        self.port = port = int(printed[0].rpartition(":")[2])
        self.engines: Sequence[HttpEngine] = ()
        self._logged: dict[str, dict[str, Any]] = {}
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.stub = ext_proc_grpc.ExternalProcessorStub(self.channel)
        self.endpoints = sorted(map(messages.endpoint_of, urls))

    def process_all(self, requests: Sequence[Any]) -> list[Any]:
        """Send a whole stream; return all answers."""
        return list(self.stub.Process(iter(requests), timeout=PATIENCE))

    def line(self, request_id: str) -> dict[str, Any]:
        """Return a request's line of the access log, once it has ended."""
        lines = self.lines()
        while request_id not in self._logged:
            line = next(lines)
            self._logged[line["id"]] = line
        return self._logged[request_id]

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the access log."""
        for line in self.process.err:
            if line.startswith("{"):
                yield json.loads(line)


@contextmanager
def picker(*options: str, ranks: int = 1, is_plain: bool = True) -> Iterator[Picker]:
    """Run a picker in front of two engines."""
    with http_engines("a", "b", ranks=ranks) as engines:
        with picker_of([engine.url for engine in engines], *options, is_plain=is_plain) as served:
            served.engines = engines
            yield served


@contextmanager
def picker_of(urls: Sequence[str], *options: str, is_plain: bool = True) -> Iterator[Picker]:
    """Run a picker in front of engines at these URLs."""
    listening = ["--host", "127.0.0.1", "--port", "0", "--access-log", "--endpoints=3"]
    listening += ["--plain"] if is_plain else []
    with started("epp", *listening, *options, *urls) as process:
        # Where it listens, where its metrics are, and the engines that it has found.
        number = 1 + ("--metrics-port" in options) + len(urls)
        served = Picker(process, [process.out.readline() for _ in range(number)], urls)
        try:
            yield served
        finally:
            served.channel.close()


def iter_open(requests: list[Any]) -> Iterator[Any]:
    """Yield requests, and then nothing, without an end."""
    yield from requests
    threading.Event().wait(PATIENCE)


def head(path: str = CHAT, method: str = "POST", *, end: bool = False, **fields: str) -> Any:
    """The message of a request's head."""
    message = ext_proc.ProcessingRequest()
    named = {":path": path, ":method": method}
    named |= {name.replace("_", "-"): value for name, value in fields.items()}
    for name, value in named.items():
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = DUPLEX
    message.protocol_config.response_body_mode = DUPLEX
    return message


def body(data: bytes, *, end: bool = True, kind: str = "request_body") -> Any:
    message = ext_proc.ProcessingRequest()
    part = getattr(message, kind)
    part.body, part.end_of_stream = data, end
    return message


def trailers(kind: str = "request_trailers") -> Any:
    message = ext_proc.ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


def answer_head(status: str = "200", content_type: str = "application/json") -> Any:
    message = ext_proc.ProcessingRequest()
    for name, value in ((":status", status), ("content-type", content_type)):
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    return message


def chat(text: str = "Once upon a time, in a land of blocks. " * 4, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "fake-model", "messages": messages, **fields}).encode()


def fields_of(answer: Any, part: str = "request_headers") -> dict[str, bytes]:
    """The fields that an answer sets."""
    options = getattr(answer, part).response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value for option in options}


def endpoints_in(answer: Any, part: str = "request_headers") -> list[str]:
    """The destinations that an answer names, in both ways alike: the first, and where to retry."""
    named = fields_of(answer, part)[messages.DESTINATION].decode()
    assert answer.dynamic_metadata[messages.NAMESPACE][messages.DESTINATION] == named
    return named.split(",")


def endpoint_in(answer: Any, part: str = "request_headers") -> str:
    """The destination that an answer names."""
    return endpoints_in(answer, part)[0]


def streamed(answers: Sequence[Any], kind: str = "request_body") -> bytes:
    """The body that answers stream; only the last one ends it."""
    pieces = [
        getattr(answer, kind).response.body_mutation.streamed_response
        for answer in answers
        if answer.WhichOneof("response") == kind
    ]
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.body) <= messages.PIECE for piece in pieces)
    return b"".join(piece.body for piece in pieces)
