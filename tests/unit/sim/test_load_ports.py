"""Where a simulated SGLang engine publishes its load: SGLang's own rule for the ports."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.sim.releases import Dialect
from gateway.sim.settings import EngineSettings


def port(first: int, replay: int | None = None, endpoint: str | None = "auto", **more: Any) -> int | None:
    settings = EngineSettings(**{"dialect": Dialect.SGLANG, "load_publish_endpoint": endpoint} | more)
    return settings.load_port(first, replay)


@pytest.mark.parametrize("endpoint", [None, "off"])
def test_it_is_off_unless_asked_for(endpoint: str | None) -> None:
    assert port(5557, endpoint=endpoint) is None
    assert EngineSettings().load_port(5557, None) is None


def test_auto_takes_the_ports_after_the_events_and_makes_way_for_replays() -> None:
    assert port(5557) == 5558
    assert port(5557, 5657, data_parallel_size=4) == 5561
    assert port(5557, 5558) == 5559
    assert port(5557, 5559, data_parallel_size=2) == 5561
    assert port(5557, 5560, data_parallel_size=2) == 5562, "the second port of each would be the same"


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_an_address_says_where(host: str) -> None:
    assert port(5557, endpoint=f"tcp://{host}:6000") == 6000


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"endpoint": "tcp://10.0.0.1:6000"}, "neither auto"),  # would connect
        ({"endpoint": "tcp://*:5558", "data_parallel_size": 2}, "run into the events"),  # the second rank's
        ({"endpoint": "tcp://*:65535", "data_parallel_size": 2}, "no 2 ports"),
        ({"endpoint": "on"}, "neither auto"),
        ({"dialect": Dialect.VLLM}, "from 0.5.19 on"),
        ({"version": "0.5.18"}, "from 0.5.19 on"),
        ({"events": False}, "publish events too"),
    ],
)
def test_what_the_engine_refuses(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        port(5557, **wrong)
