"""The load messages of real SGLang releases: read as what they mean, and published alike by the simulated engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.records import LoadSample, LoadSource
from gateway.sim.load_publisher import LOAD_TOPIC, LoadStat, encode_load
from gateway.upstream.load_socket import parse_load

HERE = Path(__file__).parent / "kv_events"
RELEASES = {"sglang_0.5.19_load_stat": (0, 5, 19), "sglang_0.5.20_load_stat": (0, 5, 20)}


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", RELEASES)
def test_a_message_is_read(name: str) -> None:
    frames = [bytes.fromhex(frame) for frame in golden(name)["frames_hex"]]
    sample = LoadSample(3, 1, 4096 / 65536, source=LoadSource.SOCKET)
    assert parse_load(frames, 0) == (17, sample)


@pytest.mark.parametrize("name", RELEASES)
def test_the_simulated_engine_publishes_the_same_bytes(name: str) -> None:
    content = golden(name)
    said = content["decoded"]["load"]
    stat = LoadStat(*(value for field, value in said.items() if field != "type"))
    assert encode_load(stat, RELEASES[name]).hex() == content["frames_hex"][2]
    assert LOAD_TOPIC.encode().hex() == content["frames_hex"][0]
