"""The commands as a user runs them: processes, signals, exit codes, curl."""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from gateway.config import read_keys
from gateway.credentials import key_hash
from gateway.runtime.interpreter import is_compiled
from tests.integration.processes import KVGATE, PATIENCE_S, Program, Served, engine, gateway

BODY = {
    "model": "demo",
    "max_tokens": 5,
    "messages": [
        {"role": "system", "content": "You are the assistant of a bicycle shop. " * 20},
        {"role": "user", "content": "How do I fix a flat tyre?"},
    ],
}


def test_serve_engine_curl_explain_and_a_clean_end(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(BODY))
    with ExitStack() as stack:
        workers = [engine(stack, "--speed", "50")[1] for _ in range(2)]
        served = gateway(stack, *_workers(workers))
        program, url, admin = served.program, served.url, served.admin

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

        program.until(lambda: int(str(explained()["predicted_tokens"])) > 0)
        assert explained()["worker"] == chosen
        table = subprocess.run(
            [*KVGATE, "explain", "-", "--admin", admin],
            input=body.read_bytes(), capture_output=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert f"-> {chosen}" in table.stdout.decode()

        program.process.send_signal(signal.SIGTERM)
        assert program.ended() == 0
        lines = [json.loads(line) for line in program.output.splitlines()]
        assert [line["event"] for line in lines].count("request") == 1
        assert lines[-1]["event"] == "stopped"
        assert lines[-1]["open_leases"] == 0
        assert "bicycle" not in program.output


def test_open_streams_finish_after_sigterm() -> None:
    with ExitStack() as stack:
        served, _ = _gateway_and_engines(stack, engines=1)
        client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
        body = {"model": "demo", "prompt": [400] * 64, "max_tokens": 100, "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.program.process.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert text.endswith("data: [DONE]")
        assert served.program.ended() == 0


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


def _workers(urls: Sequence[str]) -> list[str]:
    return [part for url in urls for part in ("--worker", url)]


def _gateway_and_engines(stack: ExitStack, *, engines: int) -> tuple[Served, list[Program]]:
    started = [engine(stack) for _ in range(engines)]
    return gateway(stack, *_workers([url for _, url in started])), [program for program, _ in started]


def test_fifty_streams_finish_while_nothing_new_is_taken() -> None:
    with ExitStack() as stack:
        served, _ = _gateway_and_engines(stack, engines=2)
        program, url = served.program, served.url
        streams = _streams(stack, url, 50, tokens=150)
        program.process.send_signal(signal.SIGTERM)
        program.found(r'"event":"(draining)')
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        for lines in streams:
            text = [line for line in lines if line]
            assert text[-1] == "data: [DONE]"
            assert not any('"error":' in line for line in text)
        assert program.ended() == 0
        last = json.loads(program.output.splitlines()[-1])
        assert (last["event"], last["open_leases"]) == ("stopped", 0)


def test_a_second_signal_forces_the_end() -> None:
    with ExitStack() as stack:
        served, _ = _gateway_and_engines(stack, engines=1)
        program, process = served.program, served.program.process
        streams = _streams(stack, served.url, 1, tokens=2000)
        process.send_signal(signal.SIGTERM)
        program.found(r'"event":"(draining)')
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert program.ended() == -signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            list(streams[0])


def test_a_killed_worker_takes_its_own_streams_only() -> None:
    with ExitStack() as stack:
        served, engines = _gateway_and_engines(stack, engines=2)
        url = served.url
        streams = _streams(stack, url, 20, tokens=150)
        engines[0].process.kill()
        ends = []
        for lines in streams:
            text = [line for line in lines if line]
            ends.append(text[-1])
        broken = [json.loads(end[6:])["error"]["code"] for end in ends if end != "data: [DONE]"]
        assert set(broken) == {"worker_broken"}
        assert 0 < len(broken) < len(ends)
        for _ in range(5):
            assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200
        metrics = served.page("/metrics")
        for name in ("accounting_drift", "worker_inflight_requests", "worker_inflight_tokens"):
            values = re.findall(rf"^kvgate_{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
            assert values
            assert {float(value) for value in values} == {0.0}
        assert "kvgate_task_restarts_total 0" in metrics
        served.program.process.send_signal(signal.SIGTERM)
        assert served.program.ended() == 0


def test_version_says_what_runs() -> None:
    said = subprocess.run([*KVGATE, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    form = "compiled" if is_compiled() else "not compiled"
    assert said == f"kvgate {metadata.version('kvgate')} ({form}, Python {platform.python_version()})\n"


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
