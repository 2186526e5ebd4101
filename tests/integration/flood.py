"""A publisher in a process of its own that floods whoever follows it, once it is told to.

    python -m tests.integration.flood REPLAYED LIVE

It prints its two endpoints as JSON, waits for a line on stdin, then answers replays with REPLAYED batches and publishes
LIVE more at once. It ends with the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec

from tests.integration.publisher import engine
from tests.integration.truth import BLOCK, stored

BLOCKS_A_BATCH = 2


def history(batches: int) -> list[bytes]:
    """Batches of two blocks each, chains of eight."""
    payloads = []
    for number in range(batches):
        names = [1 + 2 * number, 2 + 2 * number]
        tokens = [number % 50_000, number // 50_000, *range(BLOCKS_A_BATCH * BLOCK - 2)]
        parent = 2 * number if number % 4 else None
        payloads.append(msgspec.msgpack.encode([float(number), [stored(names, tokens, parent)], 0]))
    return payloads


def main(replayed: int, live: int) -> None:
    """Publish until stdin ends."""
    payloads = history(replayed + live)
    with engine() as publisher:
        publisher.answering.clear()
        publisher.buffer.extend(enumerate(payloads[:replayed]))
        publisher.seq = replayed
        source = publisher.source()
        sys.stdout.write(json.dumps({"kv_events": source.endpoint, "kv_replay": source.replay_endpoint}) + "\n")
        sys.stdout.flush()
        sys.stdin.readline()
        asyncio.run(publisher.subscriber())
        publisher.answering.set()
        for payload in payloads[replayed:]:
            publisher.publish(raw=payload)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
