"""What a turn of a chat costs a router: `kvgate serve` beside the routers its budgets name, in one run.

    python -m benchmarks.chats [--smg-python PYTHON] [--dynamo-python PYTHON] [--rounds 5]

Chats of 8 turns that nobody has seen before, behind one of four system prompts of 8 KB, each turn with all that was
said, not streamed. CPU is what the kernel charged to the router's process tree for each turn, user and system; turns
begin by a timetable, the same for all. Rounds are interleaved and bring the same chats to each, so ratios of
neighbouring rounds are what holds.

- `approximate`: no tokenizer, no events; beside smg with its policy `cache_aware`, in front of the same simulated
  engines.
- `exact`: new text is tokenised, the engines' events are followed; beside the frontend of ai-dynamo in its mode `kv`.
  It fronts workers of its own only: its mockers, with the same tokenizer and template; their CPU is not counted.

The peers are no dependencies. Each lives in an environment of its own:

    python -m venv /tmp/smg && /tmp/smg/bin/pip install smg
    python -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo-runtime packaging pyyaml msgspec uvloop
    /tmp/dynamo/bin/pip install --no-deps ai-dynamo
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO

import uvloop

from benchmarks.prefix import MODEL
from benchmarks.process_cpu import cpu_s
from benchmarks.relay import ending, free_port, started
from benchmarks.relay_load import Client
from benchmarks.train_demo_tokenizer import Writer

ENGINES = 2
TURNS = 8
CHATS = 50
"""Begun in one round, side by side."""
SYSTEM_PROMPTS = 4
SYSTEM_CHARS = 8_192
TURN_CHARS = 380
RATE = 200
"""Turns a second: a quarter of what the slowest of them can do on one core."""
_CONNECTIONS = 64
_KV_TOKENS = 400_000


MODES = ("approximate", "exact")


@dataclass(frozen=True, slots=True)
class Peers:
    """Pythons of environments that have them."""

    smg: Path | None = None
    dynamo: Path | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A router: its port, and the process whose CPU is taken."""

    port: int
    pid: int


def measure(mode: str, *, rounds: int = 5, peers: Peers) -> dict[str, float | str]:
    """Microseconds of CPU a turn, medians over the rounds; `ratio` is ours beside the peer's, where there is one.
    `mode` is one of `MODES`. Raises RuntimeError when a peer that was given does not run."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("wb"))
        with model_apart(folder) as model:
            engines = [_engine(stack, log, model) for _ in range(ENGINES)]
            if mode == "exact":
                targets = {"kvgate": _kvgate(stack, log, folder, engines, exact=True)}
        if mode == "approximate":
            targets = {"kvgate": _kvgate(stack, log, folder, engines, exact=False)}
            if peers.smg is not None:
                targets["smg"] = _smg(stack, log, peers.smg, engines)
        elif peers.dynamo is not None:
            targets["dynamo"] = _dynamo(stack, log, folder, peers.dynamo)
        return uvloop.run(_measure(targets, rounds))


@contextlib.contextmanager
def model_apart(folder: Path) -> Iterator[Path]:
    """A copy of the demo model's files for engines to start with. Afterwards it is gone, as for a gateway that does not
    share a disk with its engines: it finds no tokenizer where they say that theirs lies."""
    model = Path(shutil.copytree(MODEL, folder / "model"))
    yield model
    shutil.rmtree(model)


def turns(seed: int) -> list[bytes]:
    """The requests of one round: the first turns of all chats, then the second ones, and so on."""
    words, prompts = Writer(seed), Writer(0)
    systems = [_text(prompts, SYSTEM_CHARS) for _ in range(SYSTEM_PROMPTS)]
    chats = [[{"role": "system", "content": systems[number % SYSTEM_PROMPTS]}] for number in range(CHATS)]
    requests = []
    for _ in range(TURNS):
        for chat in chats:
            chat.append({"role": "user", "content": _text(words, TURN_CHARS)})
            requests.append(_post({"model": "demo", "messages": chat, "max_tokens": 1, "temperature": 0.7}))
            chat.append({"role": "assistant", "content": _text(words, TURN_CHARS)})
    return requests


def _text(writer: Writer, chars: int) -> str:
    text = ""
    while len(text) < chars:
        text += writer.prose() + " "
    return text[:chars]


def _post(body: Mapping[str, object]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        b"user-agent: bench/1\r\nauthorization: Bearer sk-none\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )


# ---------------------------------------------------------------- who takes part


def _engine(stack: contextlib.ExitStack, log: IO[bytes], model: Path) -> str:
    port = free_port()
    command = [sys.executable, "-m", "gateway", "engine", "--port", str(port), "--speed", "1000"]
    started(stack, [*command, "--kv-tokens", str(_KV_TOKENS), "--tokenizer", str(model)], port, log)
    return f"http://127.0.0.1:{port}"


def _kvgate(stack: contextlib.ExitStack, log: IO[bytes], folder: Path, engines: list[str], *, exact: bool) -> Target:
    port, config = free_port(), folder / "kvgate.yaml"
    events = "auto" if exact else "off"
    lines = ["workers:", *(f"  - {{url: '{engine}', kv_events: {events!r}}}" for engine in engines)]
    config.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    return Target(port, started(stack, [*command, "--port", str(port), "--admin-port", "0"], port, log, path="/ready"))


def _smg(stack: contextlib.ExitStack, log: IO[bytes], python: Path, engines: list[str]) -> Target:
    port = free_port()
    command = [str(python), str(python.parent / "smg"), "launch", "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines, "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return Target(port, started(stack, [*command, "--disable-tokenizer-autoload"], port, log))


def _dynamo(stack: contextlib.ExitStack, log: IO[bytes], folder: Path, python: Path) -> Target:
    model, port = folder / "dynamo-model", free_port()
    shutil.copytree(MODEL, model)
    # What it reads of a model besides the tokenizer and the template; sizes of no meaning.
    (model / "config.json").write_text(
        '{"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","hidden_size":64,"intermediate_size":128,'
        '"num_attention_heads":4,"num_hidden_layers":2,"num_key_value_heads":2,"vocab_size":32000,'
        '"max_position_embeddings":131072,"eos_token_id":0,"bos_token_id":0}'
    )
    (model / "generation_config.json").write_text('{"eos_token_id":0,"bos_token_id":0}')
    at = "127.0.0.1"
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": at,
        "DYN_SYSTEM_HOST": at,
        "DYN_EVENT_PLANE_HOST": at,
        "DYN_TCP_RESPONSE_STREAM_HOST": at,
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    prefix = ["env", *(f"{name}={value}" for name, value in environment.items()), str(python), "-m"]
    mocker = ["dynamo.mocker", "--model-path", str(model), "--model-name", "demo", "--num-workers", str(ENGINES)]
    mocker += ["--block-size", "16", "--num-gpu-blocks-override", str(_KV_TOKENS // 16), "--speedup-ratio", "1000"]
    stack.enter_context(ending(subprocess.Popen([*prefix, *mocker], stdout=log, stderr=log)))
    frontend = ["dynamo.frontend", "--http-host", at, "--http-port", str(port)]
    frontend += ["--router-mode", "kv", "--kv-cache-block-size", "16"]
    return Target(port, started(stack, [*prefix, *frontend], port, log))


# ---------------------------------------------------------------- what they do


async def _measure(targets: Mapping[str, Target], rounds: int) -> dict[str, float | str]:
    for target in targets.values():
        await _until_answered(target.port)
    cost_us: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(rounds + 1):
        requests = turns(seed=number + 1)
        for name, target in targets.items():
            us = await cpu_us_a_turn(target, requests)
            if number:  # the first round teaches the system prompts
                cost_us[name].append(us)
    ours = cost_us["kvgate"]
    peer = next((name for name in cost_us if name != "kvgate"), None)
    theirs = cost_us[peer] if peer is not None else [math.nan] * rounds
    return {
        "turns": float(rounds * TURNS * CHATS),
        "body_bytes": statistics.mean(map(len, turns(seed=1))),
        "kvgate_us": statistics.median(ours),
        "peer": peer or "none given",
        "peer_us": statistics.median(theirs),
        "ratio": statistics.median(one / other for one, other in zip(ours, theirs, strict=True)),
    }


async def cpu_us_a_turn(target: Target, requests: list[bytes]) -> float:
    """Of one round; connections are opened before it begins."""
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(Client, "127.0.0.1", target.port) for _ in range(_CONNECTIONS)]
    clients = [client for _, client in opened]
    before = cpu_s(target.pid)
    await _paced(clients, requests)
    used = cpu_s(target.pid) - before
    for client in clients:
        client.close()
    return used / len(requests) * 1e6


async def _until_answered(port: int) -> None:
    """A router may answer before it knows its workers."""
    first = _post({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    deadline = perf_counter() + 30
    while True:
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
        try:
            await asyncio.wait_for(client.ask(first), 5)
        except (ConnectionError, TimeoutError) as error:
            if perf_counter() > deadline:
                raise RuntimeError("a router does not come to answer a chat") from error
            await asyncio.sleep(0.2)
        else:
            return
        finally:
            client.close()


async def _paced(clients: list[Client], requests: list[bytes]) -> None:
    """Open loop: a turn begins at its time, on the connection that was used last of those that are free."""
    idle = list(clients)
    began = perf_counter() + 0.05

    async def one(client: Client, request: bytes) -> None:
        await client.ask(request)
        idle.append(client)

    running = []
    for number, request in enumerate(requests):
        delay = began + number / RATE - perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        while not idle:  # noqa: ASYNC110  a benchmark that cannot keep up waits
            await asyncio.sleep(0.001)
        running.append(asyncio.create_task(one(idle.pop(), request)))
    await asyncio.gather(*running)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smg-python", type=Path)
    parser.add_argument("--dynamo-python", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    peers = Peers(smg=given.smg_python, dynamo=given.dynamo_python)
    for mode in MODES:
        print(mode)
        for name, value in measure(mode, rounds=given.rounds, peers=peers).items():
            print(f"  {name:12} {value if isinstance(value, str) else format(value, '.2f'):>12}")


if __name__ == "__main__":
    main()
