"""The radix tree of ai-dynamo-runtime (the index of NVIDIA Dynamo's router, in Rust) under the same work as our index.

It is no dependency: this file runs under the Python of an environment of its own, which has nothing of ours,

    python -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo-runtime
    python -m benchmarks --only index --only lookup --dynamo-python /tmp/dynamo/bin/python

and prints its figures as one line of JSON. What both sides do is described once, in the functions that both import.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_SIZE = 16
HOW_TO_INSTALL = "python -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo-runtime"

CELLS = [(tokens, workers) for tokens in (1_024, 8_192, 65_536) for workers in (16, 64)]
"""Lengths of the prompt and sizes of the fleet a lookup is timed for."""

CHAIN = 512
INGESTED = 51_200
RESIDENT = 90_112
"""Blocks a chain, and blocks in the measurements of ingest and memory. The last is just above a number at which
Python's dictionaries grow: our worst case."""


class Chain(NamedTuple):
    """Blocks one after the other: their names and their tokens."""

    names: list[int]
    tokens: list[int]


def chains(blocks: int, *, seed: int) -> Iterator[Chain]:
    """Prompts of `CHAIN` blocks that share nothing, `blocks` in all."""
    rng = random.Random(seed)
    for _ in range(0, blocks, CHAIN):
        names = [rng.getrandbits(64) for _ in range(CHAIN)]
        yield Chain(names, [rng.randrange(150_000) for _ in range(CHAIN * BLOCK_SIZE)])


def held_prompt(tokens: int, workers: int) -> tuple[list[int], list[int]]:
    """A prompt, and how many of its blocks each worker holds: every one another number, the last one all of them."""
    rng = random.Random(tokens + workers)
    prompt = [rng.randrange(150_000) for _ in range(tokens + 1)]
    total = tokens // BLOCK_SIZE
    lengths = [rng.randrange(1, total) for _ in range(workers - 1)]
    return prompt, [*lengths, total]


def cpu_us(action: Callable[[], object], *, rounds: int = 7, at_least_s: float = 0.02) -> float:
    """CPU of the process for one call, all threads, in microseconds: the best of some rounds."""
    calls = 1
    while True:
        took = _cpu_s(action, calls)
        if took >= at_least_s:
            break
        calls *= 2
    return min(_cpu_s(action, calls) for _ in range(rounds)) / calls * 1e6


def _cpu_s(action: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        action()
    return time.process_time() - began


def ask(python: Path | None) -> Mapping[str, Any] | None:
    """The peer's figures from a run under its own Python; None without one. Raises RuntimeError when it cannot run."""
    if python is None:
        return None
    run = subprocess.run([python, __file__], capture_output=True, text=True, timeout=600, check=False)
    if run.returncode:
        raise RuntimeError(f"{python} cannot run ai-dynamo-runtime: {run.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, Any] = json.loads(run.stdout)
    return figures


# ---------------------------------------------------------------- what runs under the peer's Python


def _measure() -> dict[str, Any]:
    from importlib.metadata import version

    from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

    def hashes(tokens: list[int]) -> list[int]:
        found: list[int] = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
        return found

    def event(number: int, parent: int | None, names: list[int], contents: list[int]) -> bytes:
        blocks = [{"block_hash": n, "tokens_hash": c} for n, c in zip(names, contents, strict=True)]
        stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
        return json.dumps({"event_id": number, "data": stored, "dp_rank": 0}).encode()

    def lookup(tokens: int, workers: int) -> float:
        tree = RadixTree()
        prompt, lengths = held_prompt(tokens, workers)
        contents = hashes(prompt)
        rng = random.Random(1)
        for worker, length in enumerate(lengths):
            names = [rng.getrandbits(64) for _ in range(length)]
            tree.apply_event(worker, event(0, None, names, contents[:length]))
        if max(tree.find_matches(contents).scores.values()) != tokens // BLOCK_SIZE:
            raise AssertionError("the tree did not take every block")
        return cpu_us(lambda: tree.find_matches(contents))

    def ingest(per_event: int) -> float:
        """Hashing of the tokens and applying; the events' JSON is made beforehand, as it would not be in Rust."""
        work: list[tuple[list[int], bytes]] = []
        for at, (names, tokens) in enumerate(chains(INGESTED, seed=1)):
            contents = hashes(tokens)
            for first in range(0, CHAIN, per_event):
                last = first + per_event
                parent = names[first - 1] if first else None
                part = tokens[first * BLOCK_SIZE : last * BLOCK_SIZE]
                work.append((part, event(at * CHAIN + first, parent, names[first:last], contents[first:last])))
        best = float("inf")
        for _ in range(3):
            tree = RadixTree()
            began = time.process_time()
            for part, payload in work:
                hashes(part)
                tree.apply_event(0, payload)
            tree.find_matches([1])  # applying is done in the background: wait for it
            best = min(best, time.process_time() - began)
        return INGESTED / best

    def memory() -> float:
        tree = RadixTree()
        tree.apply_event(1, event(0, None, [1], [1]))
        before = _rss()
        for names, tokens in chains(RESIDENT, seed=2):
            tree.apply_event(0, event(0, None, names, hashes(tokens)))
        tree.find_matches([1])
        return (_rss() - before) / RESIDENT

    return {
        "version": version("ai-dynamo-runtime"),
        "memory_bytes_per_block": memory(),
        "ingest_one_block": ingest(1),
        "ingest_merged": ingest(CHAIN),
        "lookup_us": {f"{tokens} {workers}": lookup(tokens, workers) for tokens, workers in CELLS},
    }


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(_measure()))
