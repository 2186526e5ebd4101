"""No secret comes out again: not in the log, metrics, admin answers or errors, and not to a worker it is not for."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.credentials import key_hash
from tests.integration.processes import PATIENCE_S, Served, engine, running
from tests.integration.relay_rig import CHAT
from tests.integration.test_cli import BODY

CLIENT = "kvg-client-secret-0123456789"
OTHER = "kvg-other-secret-0123456789"
WRONG = "kvg-wrong-secret-0123456789"
WORKER = "sk-worker-secret-0123456789"
TOKEN = "admin-secret-0123456789"
GONE = "sk-gone-secret-0123456789"
ADDED = "sk-added-secret-0123456789"


def test_no_secret_comes_out_again(tmp_path: Path) -> None:
    """A gateway at its most talkative, with traffic of every kind; then everything it has said is searched."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"tenant": "a", "hash": key_hash(CLIENT), "requests_per_minute": 1}]}))
    said: list[str] = []
    with ExitStack() as stack:
        worker, worker_url = engine(stack, "--speed", "50")
        config = tmp_path / "kvgate.yaml"
        tree: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "ready_timeout_s": 1},
            "auth": {
                "keys_file": str(keys),
                "keys": [{"key": OTHER, "tenant": "b"}],
                "tenant_salt": True,
                "admin_token": TOKEN,
            },
            "workers": [
                {"url": worker_url, "name": "w1", "api_key": WORKER},
                {"url": "http://127.0.0.1:9", "name": "gone", "api_key": GONE},
            ],
            "telemetry": {"log_level": "debug"},
        }
        config.write_text(yaml.safe_dump(tree))
        program = stack.enter_context(running("serve", "--config", str(config)))
        served = Served(program)
        client = stack.enter_context(httpx.Client(base_url=served.url, timeout=PATIENCE_S))
        admin = stack.enter_context(httpx.Client(base_url=served.admin, timeout=PATIENCE_S))

        statuses = []
        for key in (CLIENT, OTHER, WRONG):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": f"Basic {key}"}):
                for body in (BODY, BODY, {**BODY, "model": "nope"}, {**BODY, "messages": key}):
                    answer = client.post(CHAT, json=body, headers=headers)
                    statuses.append(answer.status_code)
                    said.append(answer.text + str(answer.headers))
        assert {200, 401, 404, 400, 429} <= set(statuses)
        said.append(client.get("/v1/models", headers={"authorization": f"Bearer {WRONG}"}).text)
        keys.write_text(f"keys: [{{tenant: a, key: {CLIENT}}}]")
        program.found("(keys file not used)")

        token = {"authorization": f"Bearer {TOKEN}"}
        admin.post("/admin/workers", json={"url": "http://127.0.0.1:9", "api_key": ADDED}, headers=token)
        admin.post("/admin/workers", json={"url": 5, "api_key": ADDED}, headers=token)
        admin.post("/admin/workers", json={"url": "http://127.0.0.1:9", "api_keys": ADDED}, headers=token)
        for headers in (token, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}):
            for path in admin.get("/admin/openapi.json").json()["paths"]:
                answer = admin.get(path.replace("{worker_id}", "w1"), headers=headers)
                said.append(answer.text + str(answer.headers))
            said.append(admin.post("/admin/explain", content=json.dumps(BODY), headers=headers).text)
        shown = admin.get("/admin/config", headers=token).json()
        assert shown["settings"]["auth"]["admin_token"] == shown["settings"]["auth"]["keys"][0]["key"] == "**********"
        assert shown["settings"]["workers"][0]["api_key"] == "**********"
        worker_saw = httpx.get(f"{worker_url}/sim/state").text
        program.process.send_signal(signal.SIGTERM)
        assert program.ended() == 0
    everything = "\n".join([*said, worker_saw, program.output, worker.output])
    assert '"tenant":"a"' in everything
    for secret in (CLIENT, OTHER, WRONG, WORKER, TOKEN, GONE, ADDED, key_hash(CLIENT), key_hash(OTHER)):
        at = everything.find(secret)
        assert at < 0, everything[max(0, at - 300) : at + 100]
