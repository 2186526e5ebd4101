"""The commands as a user runs them: processes, signals, exit codes, curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.config import read_keys
from gateway.credentials import key_hash

KVGATE = [sys.executable, "-m", "gateway"]
PATIENCE_S = 30.0
BODY = {
    "model": "demo",
    "max_tokens": 5,
    "messages": [
        {"role": "system", "content": "You are the assistant of a bicycle shop. " * 20},
        {"role": "user", "content": "How do I fix a flat tyre?"},
    ],
}


@contextmanager
def running(*args: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    with log.open("wb") as out:
        process = subprocess.Popen([*KVGATE, *args], stderr=out, stdout=out, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def found(log: Path, pattern: str) -> str:
    """The first group of a pattern in a log, as soon as it is there."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        match = re.search(pattern, log.read_text())
        if match:
            return match[1]
        time.sleep(0.02)
    raise AssertionError(f"no {pattern!r} in:\n{log.read_text()}")


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def ready(url: str) -> Callable[[], bool]:
    def check() -> bool:
        return httpx.get(f"{url}/ready").status_code == 200

    return check


def test_serve_engine_curl_explain_and_a_clean_end(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(BODY))
    with ExitStack() as stack:
        workers = []
        for number in (1, 2):
            log = tmp_path / f"engine{number}.log"
            stack.enter_context(running("engine", "--port", "0", "--speed", "50", log=log))
            workers += ["--worker", found(log, r"at (http://\S+),")]
        log = tmp_path / "serve.log"
        gateway = stack.enter_context(running("serve", *workers, "--port", "0", "--admin-port", "0", log=log))
        url, admin = found(log, r'"url":"([^"]+)'), found(log, r'"admin":"([^"]+)')
        eventually(ready(url))

        curl = [
            "curl",
            "-s",
            "-i",
            f"{url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            "-d",
            f"@{body}",
        ]
        if shutil.which("curl"):
            answer = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
            assert answer.startswith("HTTP/1.1 200 OK")
            worker = re.search(r"x-kvgate-worker: (\S+)", answer)
            assert worker is not None
        else:
            worker = re.match(r"(.*)", httpx.post(f"{url}/v1/chat/completions", json=BODY).headers["x-kvgate-worker"])
            assert worker is not None
        chosen = worker[1]
        assert chosen in ("w1", "w2")

        def explained() -> dict[str, object]:
            done = subprocess.run(
                [*KVGATE, "explain", str(body), "--admin", admin, "--json"],
                capture_output=True, text=True, check=True, timeout=PATIENCE_S,
            )  # fmt: skip
            decision = json.loads(done.stdout)
            assert isinstance(decision, dict)
            return decision

        eventually(lambda: int(str(explained()["predicted_tokens"])) > 0)
        assert explained()["worker"] == chosen
        table = subprocess.run(
            [*KVGATE, "explain", "-", "--admin", admin],
            input=body.read_bytes(), capture_output=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert f"-> {chosen}" in table.stdout.decode()

        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(PATIENCE_S) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["event"] for line in lines].count("request") == 1
        assert lines[-1]["event"] == "stopped"
        assert lines[-1]["open_leases"] == 0
        assert "bicycle" not in log.read_text()


def test_open_streams_finish_after_sigterm(tmp_path: Path) -> None:
    engine_log, log = tmp_path / "engine.log", tmp_path / "serve.log"
    with ExitStack() as stack:
        stack.enter_context(running("engine", "--port", "0", log=engine_log))
        worker = found(engine_log, r"at (http://\S+),")
        gateway = stack.enter_context(running("serve", "--worker", worker, "--port", "0", "--admin-port", "0", log=log))
        url = found(log, r'"url":"([^"]+)')
        eventually(ready(url))
        client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
        body = {"model": "demo", "prompt": [400] * 64, "max_tokens": 100, "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            gateway.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert text.endswith("data: [DONE]")
        assert gateway.wait(PATIENCE_S) == 0


def _streams(stack: ExitStack, url: str, count: int, tokens: int) -> list[Iterator[str]]:
    """The lines of streams that have all begun."""
    client = stack.enter_context(httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)))
    begun = []
    for number in range(count):
        body = {"model": "demo", "prompt": [400 + number] * 64, "max_tokens": tokens, "stream": True}
        lines = stack.enter_context(client.stream("POST", f"{url}/v1/completions", json=body)).iter_lines()
        assert next(lines).startswith("data: ")
        begun.append(lines)
    return begun


def _gateway_and_engines(
    stack: ExitStack, tmp_path: Path, *, engines: int
) -> tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]], str, Path]:
    processes, workers = [], []
    for number in range(engines):
        engine_log = tmp_path / f"engine{number}.log"
        processes.append(stack.enter_context(running("engine", "--port", "0", log=engine_log)))
        workers += ["--worker", found(engine_log, r"at (http://\S+),")]
    log = tmp_path / "serve.log"
    gateway = stack.enter_context(running("serve", *workers, "--port", "0", "--admin-port", "0", log=log))
    url = found(log, r'"url":"([^"]+)')
    eventually(ready(url))
    return gateway, processes, url, log


def test_fifty_streams_finish_while_nothing_new_is_taken(tmp_path: Path) -> None:
    with ExitStack() as stack:
        gateway, _, url, log = _gateway_and_engines(stack, tmp_path, engines=2)
        streams = _streams(stack, url, 50, tokens=150)
        gateway.send_signal(signal.SIGTERM)
        found(log, r'"event":"(draining)')
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        for lines in streams:
            text = [line for line in lines if line]
            assert text[-1] == "data: [DONE]"
            assert not any('"error":' in line for line in text)
        assert gateway.wait(PATIENCE_S) == 0
        last = json.loads(log.read_text().splitlines()[-1])
        assert (last["event"], last["open_leases"]) == ("stopped", 0)


def test_a_second_signal_forces_the_end(tmp_path: Path) -> None:
    with ExitStack() as stack:
        gateway, _, url, log = _gateway_and_engines(stack, tmp_path, engines=1)
        streams = _streams(stack, url, 1, tokens=2000)
        gateway.send_signal(signal.SIGTERM)
        found(log, r'"event":"(draining)')
        assert gateway.poll() is None
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(PATIENCE_S) == -signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            list(streams[0])


def test_a_killed_worker_takes_its_own_streams_only(tmp_path: Path) -> None:
    with ExitStack() as stack:
        gateway, engines, url, log = _gateway_and_engines(stack, tmp_path, engines=2)
        streams = _streams(stack, url, 20, tokens=150)
        engines[0].kill()
        ends = []
        for lines in streams:
            text = [line for line in lines if line]
            ends.append(text[-1])
        broken = [json.loads(end[6:])["error"]["code"] for end in ends if end != "data: [DONE]"]
        assert set(broken) == {"worker_broken"}
        assert 0 < len(broken) < len(ends)
        admin = found(log, r'"admin":"([^"]+)')
        for _ in range(5):
            assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200
        metrics = httpx.get(f"{admin}/metrics").text
        for name in ("accounting_drift", "worker_inflight_requests", "worker_inflight_tokens"):
            values = re.findall(rf"^kvgate_{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
            assert values
            assert {float(value) for value in values} == {0.0}
        assert "kvgate_task_restarts_total 0" in metrics
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(PATIENCE_S) == 0


def test_demo_prints_figures(tmp_path: Path) -> None:
    done = subprocess.run(
        [*KVGATE, "demo", "--duration", "6", "--engines", "2", "--dialect", "mixed", "--json"],
        capture_output=True,
        timeout=100,
        check=True,
    )
    figures = json.loads(done.stdout)
    assert list(figures) == ["seconds", "round_robin"]
    for policy in figures.values():
        assert set(policy) == {"hit_rate", "ttft_p50_s", "ttft_p99_s", "requests", "errors", "route_miss_rate"}
        assert policy["errors"] == 0
        assert policy["requests"] > 0


def test_a_key_that_was_made_is_good(tmp_path: Path) -> None:
    done = subprocess.run(
        [*KVGATE, "key", "--tenant", "a"], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    secret, entry = re.fullmatch(r"key:   (\S+)\nentry: (- .*)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert len(secret) > 40
    assert secret not in entry
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  {entry}\n")
    keys = read_keys(path)
    assert [(key.tenant, key.digest.hex()) for key in keys] == [("a", key_hash(secret))]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["serve", "--policy", "magic"], "routing.policy"),
        (["serve", "--worker", "http://a:1/v1"], "give the base URL only"),
        (["serve", "--worker", "http://a:1", "--tokenizer", "/nowhere"], "no tokenizer.json in /nowhere"),
        (["serve", "--worker", "http://a:1", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:8000"),
        (["engine", "--preset", "huge"], "unknown preset"),
        (["engine", "--port", "99999"], "'--port': Input should be less"),
        (["engine", "--block-size", "0"], "'--block-size': Input should be greater"),
        (["serve", "--worker", "http://a:1", "--port", "8100", "--admin-port", "8100"], "both 8100"),
        (["explain", "none.json"], "none.json"),
        (["key", "--tenant", "a b"], "--tenant is 1 to 64 letters"),
    ],
)
def test_mistakes_end_with_code_2_and_say_what_is_wrong(args: list[str], said: str) -> None:
    done = subprocess.run([*KVGATE, *args], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_without_a_gateway_says_so(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}")
    done = subprocess.run(
        [*KVGATE, "explain", str(body), "--admin", "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Is `kvgate serve` running?" in done.stderr
