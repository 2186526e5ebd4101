"""`kvgate serve` and SIGHUP: a process, its file, its flags, an open stream."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import yaml

from tests.integration.processes import PATIENCE_S, engine, gateway

BODY = {"model": "demo", "prompt": [400] * 64, "max_tokens": 120, "stream": True}


def test_sighup_reads_the_file_while_a_stream_runs_and_flags_still_win(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.yaml"
    with ExitStack() as stack:
        (_, first), (_, second) = engine(stack), engine(stack)

        def says(**sections: object) -> None:
            server = {"host": "127.0.0.1", "port": 0, "admin_port": 0}
            (tmp_path / "new").write_text(yaml.safe_dump({"server": server} | sections))
            os.replace(tmp_path / "new", file)

        says(workers=[{"url": first, "name": "a"}])
        served = gateway(stack, "--config", str(file), "--policy", "round_robin")
        client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))

        def shown() -> dict[str, object]:
            answer: dict[str, object] = served.json("/admin/config")
            return answer

        with client.stream("POST", f"{served.url}/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            says(workers=[{"url": second, "name": "b"}], routing={"policy": "p2c"}, server={})
            served.program.process.send_signal(signal.SIGHUP)
            served.program.until(lambda: [worker["id"] for worker in served.json("/admin/workers")["workers"]] == ["b"])
            assert "".join(lines).endswith("data: [DONE]")
        settings = shown()
        assert settings["problems"] == []
        assert settings["needs_restart"] == ["server.host"], "the ports are flags'"
        assert settings["origins"]["routing.policy"] == "command line"  # type: ignore[index]
        assert settings["settings"]["routing"]["policy"] == "round_robin"  # type: ignore[index]
        plain = client.post(f"{served.url}/v1/completions", json={**BODY, "stream": False})
        assert plain.headers["x-kvgate-worker"] == "b"
        file.write_text("workers: [{")
        served.program.process.send_signal(signal.SIGHUP)
        served.program.until(lambda: shown()["problems"] != [])
        served.program.process.send_signal(signal.SIGTERM)
        assert served.program.ended() == 0
