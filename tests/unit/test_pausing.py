"""Long work that runs in a thread lets others run, compiled or not."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import FrameType

from gateway import keys
from gateway.pausing import let_others_run
from gateway.prefix.messages import ContentFormat, conversation
from gateway.records import BlockKey, EngineKind


def chances(work: Callable[[], object]) -> int:
    """How often others may run meanwhile: the interpreter tells of every call of a function of Python."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is let_others_run.__code__

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_hashing_a_long_prompt_lets_others_run() -> None:
    blocks = 10_000
    assert chances(lambda: keys.chain(BlockKey(1), array("I", range(16 * blocks)), 16)) == 9
    assert chances(lambda: keys.chain_of_bytes(BlockKey(1), bytes(256 * blocks), 256)) == 9
    assert chances(lambda: keys.chain(BlockKey(1), array("I", range(16 * 1000)), 16)) == 0


def test_reading_many_messages_lets_others_run() -> None:
    messages = [{"role": "user", "content": "a"}] * 640

    def read() -> None:
        conversation(messages, ContentFormat.STRING, engine=EngineKind.VLLM, keeps_developer=False)

    assert chances(read) == 10
