"""`kvgate config`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from gateway.cli.app import app
from gateway.settings import Settings, json_schema

DEMO = Path(__file__).parents[3] / "gateway" / "sim" / "demo_model"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVGATE_SERVER__PORT", "KVGATE_AUTH__ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def config(tmp_path: Path, text: str, *args: str, env: dict[str, str] | None = None, mode: int = 0o600) -> Result:
    path = tmp_path / "kvgate.yaml"
    path.write_text(text)
    path.chmod(mode)
    return CliRunner().invoke(app, ["config", args[0], "--config", str(path), *args[1:]], env=env)


def test_a_good_file_is_ok_with_what_would_run(tmp_path: Path) -> None:
    text = f"workers: [{{url: 'http://a:1', name: first}}]\nmodels: [{{name: llama, tokenizer: {_demo()}}}]\n"
    ended = config(tmp_path, text, "check", env={"KVGATE_SERVER__PORT": "8123"})
    assert ended.exit_code == 0
    assert ended.stderr == ""
    assert ended.stdout.startswith("ok\n")
    for word in ("first", "llama", "seconds", ":8123", "127.0.0.1:8001", "kvgate.yaml", "KVGATE_SERVER__PORT"):
        assert word in ended.stdout


def test_workers_that_will_be_found_are_not_none(tmp_path: Path) -> None:
    text = "redis: {url: 'redis://store'}\ndiscovery: {registry: {}, dns: [{name: gpus.example}]}\n"
    said = config(tmp_path, text, "check").stdout
    assert "found by dns gpus.example, registry" in said
    assert "none" not in said


def test_every_mistake_is_one_line_with_the_path_of_its_key(tmp_path: Path) -> None:
    ended = config(tmp_path, "server: {prot: 1}\nrouting: {alpha: -1}\n", "check")
    assert ended.exit_code == 2
    first, second = ended.stderr.splitlines()
    assert first.startswith("kvgate: server.prot: unknown key; did you mean `port`?")
    assert second.startswith("kvgate: routing.alpha: ")
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("models: [{name: llama, tokenizer: /nowhere}]", "models.llama: /nowhere"),
        ("auth: {keys_file: /nowhere.yaml}", "auth.keys_file: /nowhere.yaml: cannot be read"),
        ("server: {tls: {cert: /nowhere.pem}}", "server.tls.cert, server.tls.key: "),
        ("worker_tls: {ca: /nowhere.pem}", "worker_tls.ca: "),
    ],
)
def test_files_that_cannot_be_used_are_mistakes(tmp_path: Path, text: str, path: str) -> None:
    ended = config(tmp_path, text, "check")
    assert ended.exit_code == 2
    assert f"kvgate: {path}" in ended.stderr


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("auth: {admin_open: true}\nserver: {admin_host: 0.0.0.0}", "auth.admin_open: whoever reaches 0.0.0.0:8001"),
        ("workers: [{url: 'http://10.0.0.1:8000', api_key: s}]", "workers.0.api_key: goes to http://10.0.0.1:8000"),
        ("workers: [{url: 'http://a:1', weight: 2}]", "workers.0.weight: has no effect under the policy seconds"),
        ("routing: {policy: p2c, beta: 2}", "routing.beta: has no effect under the policy p2c"),
        ("timeouts: {total_s: 10, connect_s: 1, send_s: 1, idle_s: 1}", "timeouts.first_byte_s: is never reached"),
        ("server: {max_buffered_bytes: 2048, max_body_bytes: 4096}", "server.max_body_bytes: is never reached"),
    ],
)
def test_what_looks_wrong_is_a_warning_and_a_failure_only_when_strict(tmp_path: Path, text: str, warning: str) -> None:
    ended = config(tmp_path, text, "check")
    assert ended.exit_code == 0
    assert [line for line in ended.stderr.splitlines() if line.startswith(f"kvgate: warning: {warning}")]
    assert len(ended.stderr.splitlines()) == 1
    assert config(tmp_path, text, "check", "--strict").exit_code == 1


def test_a_list_that_another_source_replaces_is_a_warning(tmp_path: Path) -> None:
    env = {"KVGATE_WORKERS": '[{"url": "http://b:1"}]', "KVGATE_RETRIES__MAX": "1"}
    ended = config(tmp_path, "workers: [{url: 'http://a:1'}]\nretries: {max: 3}", "check", env=env)
    assert ended.stderr == "kvgate: warning: workers: the list of kvgate.yaml is not used, KVGATE_WORKERS has another\n"


def test_secrets_that_everybody_can_read_are_a_warning(tmp_path: Path) -> None:
    text = "auth: {admin_token: hush}"
    assert "auth.admin_token: stands in" in config(tmp_path, text, "check", mode=0o644).stderr
    assert config(tmp_path, text, "check", mode=0o640).stderr == ""
    elsewhere = {"KVGATE_AUTH__ADMIN_TOKEN": "hush"}
    assert config(tmp_path, "retries: {max: 3}", "check", env=elsewhere, mode=0o644).stderr == ""
    for key, text in (
        ("redis.url", "redis: {url: 'redis://:hush@store'}"),
        ("redis.password", "redis: {url: 'redis://store', password: hush}"),
        ("workers.1.api_key", "workers: [{url: 'http://127.0.0.1:1'}, {url: 'http://127.0.0.1:2', api_key: hush}]"),
        ("discovery.dns.0.api_key", "discovery: {dns: [{name: gpus, api_key: hush}]}"),
        (
            "discovery.kubernetes.api_key",
            "discovery: {kubernetes: {selector: a=b, namespace: n, api_server: 'https://a', api_key: hush}}",
        ),
    ):
        said = config(tmp_path, text, "check", mode=0o644).stderr
        assert f"warning: {key}: stands in" in said, said
        assert "hush" not in said
    assert config(tmp_path, "redis: {url: 'redis://store'}", "check", mode=0o644).stderr == ""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    keys.chmod(0o644)
    assert "auth.keys_file: " in config(tmp_path, f"auth: {{keys_file: {keys}}}", "check").stderr


def test_show_says_where_a_value_came_from_and_masks_secrets(tmp_path: Path) -> None:
    text = "server: {port: 1}\nauth: {admin_token: hush}\nworkers: [{url: 'http://a:1', api_key: hush}]\n"
    env = {"KVGATE_SERVER__PORT": "7"}
    ended = config(tmp_path, text, "show", env=env)
    assert ended.exit_code == 0
    assert "  port: 7  # KVGATE_SERVER__PORT\n" in ended.stdout
    assert "workers:  # kvgate.yaml\n" in ended.stdout
    assert "hush" not in ended.stdout
    assert yaml.safe_load(ended.stdout)["server"]["admin_port"] == 8001
    changed = yaml.safe_load(config(tmp_path, text, "show", "--changed", env=env).stdout)
    assert set(changed) == {"server", "auth", "workers"}
    assert changed["server"] == {"port": 7}
    plain = config(tmp_path, text, "show", "--yaml", env=env).stdout
    assert "#" not in plain
    shown = json.loads(config(tmp_path, text, "show", "--json", env=env).stdout)
    assert shown["settings"] == yaml.safe_load(plain)
    assert shown["origins"]["server.port"] == "KVGATE_SERVER__PORT"


def test_the_schema_is_the_one_of_the_settings() -> None:
    ended = CliRunner().invoke(app, ["config", "schema"])
    assert json.loads(ended.stdout) == json_schema()
    assert set(json.loads(ended.stdout)["properties"]) == set(Settings.model_fields)


def _demo() -> Path:
    return next(path.parent for path in DEMO.parent.rglob("tokenizer.json"))
