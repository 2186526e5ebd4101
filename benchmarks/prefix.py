"""Prefix work of one request, by part: parse, render, look up token ids, hash.

`measure()` gives the parts in microseconds of CPU for an 8-turn chat of 14 KB whose earlier turns are known, as it is
when the next turn of a conversation arrives; `python -m benchmarks.prefix` prints them, and what new text costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.train_demo_tokenizer import Writer
from gateway import keys
from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.prefix.chains import ChainTree
from gateway.records import ChatPrompt, Endpoint, InferenceRequest

MODEL = Path(__file__).parents[1] / "gateway" / "sim" / "model"
BLOCK_SIZE = 16
SYSTEM_CHARS = 8_000
TURN_CHARS = 380


def chat_body(
    turns: int = 8, *, system_chars: int = SYSTEM_CHARS, turn_chars: int = TURN_CHARS, seed: int = 1
) -> bytes:
    """A chat request with `turns` questions; a chat with fewer turns is its beginning."""
    writer = Writer(seed)

    def text(chars: int) -> str:
        words = ""
        while len(words) < chars:
            words += writer.prose() + " "
        return words[:chars]

    messages = [{"role": "system", "content": text(system_chars)}]
    for turn in range(turns):
        if turn:
            messages.append({"role": "assistant", "content": text(turn_chars)})
        messages.append({"role": "user", "content": text(turn_chars)})
    body = {"model": "demo", "messages": messages, "max_tokens": 200, "temperature": 0.7, "stream": True}
    return json.dumps(body).encode()


def measure(*, rounds: int = 2_000) -> dict[str, float]:
    """Microseconds of CPU, medians: the parts of a turn whose text is known, and `total` from bytes to blocks.

    `new_turn` is the whole prefix work of a turn that brings two new messages, which have to be tokenised.
    """
    hasher = PromptHasher.load(MODEL)
    body = chat_body()
    request = _parse(body)
    assert isinstance(request.prompt, ChatPrompt)
    prompt = request.prompt
    _blocks(hasher, request)
    text = hasher.render(prompt)
    tokenizer = hasher.tokenizer
    assert tokenizer is not None
    root = hasher.root(None, None, BLOCK_SIZE, False)
    tokens = hasher.token_ids(request)
    assert tokens is not None
    tail = tokens[0][-BLOCK_SIZE - 8 :]
    parts = {
        "parse": _median_us(lambda: _parse(body), rounds),
        "render": _median_us(lambda: hasher.render(prompt, remember=True), rounds),
        "look_up": _median_us(lambda: ChainTree.walk(root, text, tokenizer.next_cut), rounds),
        "hash": _median_us(lambda: keys.chain(root.parent_key, tail, BLOCK_SIZE), rounds),
        "total": _median_us(lambda: _blocks(hasher, _parse(body)), rounds),
    }
    return {**parts, "new_turn": _new_turn_us(min(rounds, 200))}


def _new_turn_us(rounds: int) -> float:
    """Each round is another conversation with the same system prompt, at its last turn."""
    hasher = PromptHasher.load(MODEL)
    times = []
    for seed in range(rounds):
        full = json.loads(chat_body(seed=seed, system_chars=0))
        full["messages"][0]["content"] = "You are a helpful assistant. " * (SYSTEM_CHARS // 29)
        _blocks(hasher, _parse(json.dumps({**full, "messages": full["messages"][:-2]}).encode()))
        body = json.dumps(full).encode()
        started = time.process_time_ns()
        _blocks(hasher, _parse(body))
        times.append((time.process_time_ns() - started) / 1e3)
    return median(times)


def _parse(body: bytes) -> InferenceRequest:
    return parse_request(Endpoint.CHAT, body, request_id="bench")


def _blocks(hasher: PromptHasher, request: InferenceRequest) -> int:
    work = hasher.begin(request, block_size=BLOCK_SIZE)
    if work.pending:
        work.encode()
    return work.blocks().tokens


def _median_us(call: Callable[[], object], rounds: int) -> float:
    """Median over batches, so that the clock's own cost does not show."""
    batch = 10
    times = []
    for _ in range(max(1, rounds // batch)):
        started = time.process_time_ns()
        for _ in range(batch):
            call()
        times.append((time.process_time_ns() - started) / batch / 1e3)
    return median(times)


if __name__ == "__main__":
    body = chat_body()
    print(f"8-turn chat, {len(body)} bytes, block size {BLOCK_SIZE}")
    for part, microseconds in measure().items():
        print(f"  {part:10} {microseconds:8.1f} us")
