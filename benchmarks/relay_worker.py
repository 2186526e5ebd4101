"""A worker for benchmarks: answers at once from prepared bytes, so that nearly all CPU measured elsewhere is elsewhere.

    python -m benchmarks.relay_worker --port 9001 [--chunks 100] [--every 0.02]

POST with `"stream":true` gets 100 chunks, one every 20 ms (or as given) by an absolute timetable (a late chunk does not
delay the ones after it); any other POST a chat answer of 500 bytes. `GET` answers as a vLLM worker would to a gateway's
probes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json

import uvloop

CHUNKS = 100
CHUNK_EVERY_S = 0.02


def _event(delta: dict[str, object], finish: str | None = None) -> bytes:
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_USAGE = {
    "prompt_tokens": 500,
    "total_tokens": 600,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 480},
}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:51:05 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_FIRST = _chunk(_event({"role": "assistant", "content": ""}))
_NEXT = _chunk(_event({"content": " token"}))
_USAGE_CHUNK = _chunk(
    b"data: "
    + json.dumps({"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [], "usage": _USAGE}).encode()
    + b"\n\n"
)
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_ANSWER_BODY = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 40}, "finish_reason": "stop"}],
        "usage": _USAGE,
    },
    separators=(",", ":"),
).encode()
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:51:05 GMT\r\nserver: uvicorn\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_ANSWER_BODY), _ANSWER_BODY)
)


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_NOTHING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_PAGES = {
    b"/health": _plain(b""),
    b"/version": _plain(b'{"version": "0.32.0"}'),
    b"/v1/models": _plain(b'{"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 32768}]}'),
    b"/kv_event_sources": _plain(b"{}"),
    b"/metrics": _plain(
        b'vllm:num_requests_running{engine="0",model_name="fake"} 0.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="fake"} 0.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.1\n'
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="60000"} 1.0\n'
    ),
}
"""What a gateway probes."""


class Worker(asyncio.Protocol):
    """One connection; requests one after another."""

    def __init__(self, chunks: int, every_s: float) -> None:
        self._chunks = chunks
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0
        self._began = 0.0
        self._usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        body = self._buffer[head_end + 4 :]
        if len(body) < length:
            return
        self._buffer = b""
        if not head.startswith(b"post"):
            self._transport.write(_PAGES.get(head.split(b" ", 2)[1], _NOTHING))
        elif b'"stream":true' in body:
            self._usage = b"include_usage" in body
            self._transport.write(_STREAM_HEAD + _FIRST)
            self._sent = 1
            self._began = self._loop.time()
            self._timer = self._loop.call_at(self._began + self._every_s, self._tick)
        else:
            self._transport.write(_ANSWER)

    def _tick(self) -> None:
        self._sent += 1
        if self._sent >= self._chunks:
            self._timer = None
            self._transport.write(_NEXT + (_USAGE_CHUNK if self._usage else b"") + _END)
            return
        self._transport.write(_NEXT)
        self._timer = self._loop.call_at(self._began + self._sent * self._every_s, self._tick)


async def _serve(port: int, chunks: int, every_s: float) -> None:
    made = functools.partial(Worker, chunks, every_s)
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", port, backlog=2048)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--every", type=float, default=CHUNK_EVERY_S, help="seconds")
    args = parser.parse_args()
    uvloop.run(_serve(args.port, args.chunks, args.every))
