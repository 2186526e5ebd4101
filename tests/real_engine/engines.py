"""Starting a real vLLM or SGLang server on loopback, with a tiny model and its events on.

`REAL_VLLM` names the `vllm` program of an installation that runs on this machine (`docs/testing-with-real-engines.md`
says how to make one without a GPU). Without it the tests of this folder fail.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_WITHIN_S = 900.0
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What is asked of the engine. `events` are keys of `--kv-events-config` that replace the right ones; ports are put
    in for `{events}` and `{replay}`. vLLM on a CPU takes block sizes that are multiples of 32."""

    block_size: int = 32
    prompt_tokens_details: bool = True
    hash_algorithm: str = "sha256"
    int_hashes: bool = True
    seed: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    events: Mapping[str, object] = field(default_factory=dict)
    max_length: int = 2048


@dataclass(frozen=True, slots=True)
class Engine:
    """A running server."""

    url: str
    setup: EngineSetup

    def complete(self, **body: object) -> int:
        """Send a prompt straight to it; the cached tokens it reports."""
        answer = httpx.post(f"{self.url}/v1/completions", json={"model": MODEL, "max_tokens": 1, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0


def program() -> Path:
    """The `vllm` program."""
    return _named("REAL_VLLM", "a vllm program")


def sglang() -> Path:
    """The Python of an installation of SGLang."""
    return _named("REAL_SGLANG", "the Python of an SGLang")


def _named(variable: str, what: str) -> Path:
    path = Path(os.environ.get(variable, ""))
    assert path.is_file(), f"{variable} does not name {what} (docs/testing-with-real-engines.md)"
    assert os.access(path, os.X_OK), f"{variable}: {path} is no program"
    return path


@contextmanager
def running_sglang(model: Path, setup: EngineSetup, *, log: Path) -> Iterator[Engine]:
    """SGLang instead; `block_size` is its page size, adapters and event settings are left alone."""
    port, events, replay = (_free_port() for _ in range(3))
    feed = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": "kv",
    }
    command = [
        *(str(sglang()), "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--disable-cuda-graph"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--context-length", str(setup.max_length)),
        *("--page-size", str(setup.block_size), "--enable-metrics", "--enable-cache-report"),
        *("--kv-events-config", json.dumps(feed)),
    ]
    with _served(command, f"http://127.0.0.1:{port}", setup, log) as engine:
        yield engine


@contextmanager
def running(model: Path, setup: EngineSetup, *, log: Path) -> Iterator[Engine]:
    """The server, ready; its output is in `log`. Ends it with SIGTERM."""
    port, events, replay = (_free_port() for _ in range(3))
    feed = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": f"kv@{port}",
    } | {key: _placed(value, events, replay) for key, value in setup.events.items()}
    command = [
        *(str(program()), "serve", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", str(setup.max_length), "--max-num-batched-tokens", str(setup.max_length)),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(8 << 20), "--block-size", str(setup.block_size)),
        *("--enable-prefix-caching", "--prefix-caching-hash-algo", setup.hash_algorithm),
        *("--kv-events-config", json.dumps(feed)),
    ]
    if setup.prompt_tokens_details:
        command.append("--enable-prompt-tokens-details")
    if setup.adapters:
        command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", str(len(setup.adapters)), "--lora-modules"]
        command += [f"{name}={path}" for name, path in setup.adapters.items()]
    with _served(command, f"http://127.0.0.1:{port}", setup, log) as engine:
        yield engine


@contextmanager
def _served(command: list[str], url: str, setup: EngineSetup, log: Path) -> Iterator[Engine]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(setup), cwd=log.parent)
    try:
        _until_ready(process, url, log)
        yield Engine(url, setup)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_WITHIN_S
    while time.monotonic() < until:
        with suppress(httpx.HTTPError):
            # Until it listens, its port may be somebody else's.
            ours = MODEL in httpx.get(f"{url}/v1/models", timeout=5).text
            if ours and httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        with suppress(subprocess.TimeoutExpired):
            ended = process.wait(0.5)
            raise AssertionError(f"the engine ended with {ended}:\n{log.read_text()[-4000:]}")
    raise AssertionError(f"the engine was not ready within {START_WITHIN_S:g} s:\n{log.read_text()[-4000:]}")


def _environment(setup: EngineSetup) -> dict[str, str]:
    more = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # its own sockets stay on loopback
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` pins every instance to the first core
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1" if setup.int_hashes else "0",
    }
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return kept | more | ({"PYTHONHASHSEED": setup.seed} if setup.seed is not None else {})


def _placed(value: object, events: int, replay: int) -> object:
    return value.format(events=events, replay=replay) if isinstance(value, str) else value


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
