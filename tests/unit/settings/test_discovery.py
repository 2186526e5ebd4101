"""The section `discovery`: what is refused, and what a pod finds out by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigError, Sources
from gateway.settings import Settings, name_server

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvgate.yaml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Sources(file(tmp_path, text), environ={}).read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dns: [{port: 1}]", "discovery.dns.0.name: is missing"),
        ("dns: [{name: 'a b'}]", "discovery.dns.0.name: "),
        ("dns: [{name: a, tipe: srv}]", "discovery.dns.0.tipe: unknown key; did you mean `type`?"),
        ("dns: [{name: a, server: ns.example}]", "discovery.dns.0.server: 'ns.example' is no address"),
        ("dns: [{name: a, refresh_s: 0.01}]", "discovery.dns.0.refresh_s: "),
        ("dns: [{name: a}, {name: a}]", "dns: a is given twice"),
        ("kubernetes: {}", "discovery.kubernetes.selector: is missing"),
        ("kubernetes: {selector: app=x, selctor: y}", "discovery.kubernetes.selctor: unknown key; did you mean"),
        ("kubernetes: {selector: app=x, kind: services}", "discovery.kubernetes.kind: "),
        ("kubernetes: {selector: app=x, namespace: No}", "discovery.kubernetes.namespace: "),
        ("kubernetes: {selector: app=x, api_server: 'ftp://x'}", "discovery.kubernetes.api_server: 'ftp://x' is no"),
        ("kubernetes: {selector: app=x, port: 70000}", "discovery.kubernetes.port: "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, f"discovery: {{{text}}}")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.10", ("10.0.0.10", 53)),
        ("10.0.0.10:5353", ("10.0.0.10", 5353)),
        ("fd00::1", ("fd00::1", 53)),
        ("[fd00::1]:5353", ("fd00::1", 5353)),
    ],
)
def test_addresses_of_name_servers(text: str, address: tuple[str, int]) -> None:
    assert name_server(text) == address


@pytest.mark.parametrize("text", ["", "x", "1.2.3.4:0", "1.2.3.4:x", "[fd00::1]:99999", "1.2.3.4:5:6"])
def test_what_is_no_address_of_one(text: str) -> None:
    with pytest.raises(ValueError, match="no address of a name server"):
        name_server(text)


def test_a_pod_knows_its_cluster(tmp_path: Path) -> None:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "namespace").write_text("llm\n")
    path = file(tmp_path, "discovery: {kubernetes: {selector: app=vllm}}")
    loaded = Sources(path, environ=IN_CLUSTER, account=account).read()
    found = loaded.settings.discovery.kubernetes
    assert found is not None
    assert (found.api_server, found.namespace) == ("https://10.96.0.1:6443", "llm")
    assert (found.token_file, found.ca_file) == (account / "token", account / "ca.crt")
    assert loaded.origins["discovery.kubernetes.api_server"] == "KUBERNETES_SERVICE_HOST"
    assert loaded.origins["discovery.kubernetes.namespace"] == "serviceaccount"


def test_what_is_given_wins_over_what_a_pod_finds_out(tmp_path: Path) -> None:
    text = "discovery: {kubernetes: {selector: a=b, namespace: other, api_server: 'http://127.0.0.1:8001'}}"
    found = Sources(file(tmp_path, text), environ=IN_CLUSTER).read().settings.discovery.kubernetes
    assert found is not None
    assert (found.api_server, found.namespace, found.token_file) == ("http://127.0.0.1:8001", "other", None)


def test_a_pod_without_a_service_account_has_to_be_told(tmp_path: Path) -> None:
    path = file(tmp_path, "discovery: {kubernetes: {selector: app=vllm}}")
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.namespace: .*give it"):
        Sources(path, environ=IN_CLUSTER, account=tmp_path / "none").read()


def test_a_file_may_be_checked_outside_of_its_cluster(tmp_path: Path) -> None:
    path = file(tmp_path, "discovery: {kubernetes: {selector: app=vllm}}")
    assert Sources(path, environ={}).read().settings.discovery.kubernetes is not None


def test_keys_of_workers_are_for_all_that_are_found() -> None:
    (entry,) = Settings(discovery={"dns": [{"name": "a", "pool": "p", "api_key": "k", "models": ["m"]}]}).discovery.dns
    spec = entry.as_spec("w", "http://a")
    assert (spec.pool, spec.api_key, spec.models) == ("p", "k", ("m",))
