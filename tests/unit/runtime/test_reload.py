"""What a reload does with each kind of file; the parts behind it are numbers here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.config import ConfigError, Sources
from gateway.runtime.reload import AT_START, LIVE, Prepared, Reload, Result, is_live
from gateway.settings import Settings, all_keys


class Stand:
    """A file, and what the process was told of it."""

    def __init__(self, path: Path, text: str, **sources: Any) -> None:
        self.path = path
        path.write_text(text)
        self.applied: list[Settings] = []
        self.refuses = ""
        self.broken = False
        origin = Sources(path, environ=sources.pop("environ", {}), **sources)
        self.reload = Reload(origin.read(), origin, prepare=self.prepare, apply=self.apply)

    def prepare(self, settings: Settings) -> Prepared:
        if self.broken:
            raise RuntimeError("a bug")
        if self.refuses:
            raise ConfigError([self.refuses])
        return Prepared({}, {}, ())

    def apply(self, settings: Settings, prepared: Prepared) -> None:
        self.applied.append(settings)

    async def says(self, text: str) -> Settings:
        self.path.write_text(text)
        await self.reload()
        return self.reload.settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvgate.yaml"


async def test_what_can_change_does(path: Path) -> None:
    it = Stand(path, "routing: {policy: p2c}")
    assert (await it.says("routing: {policy: random}\nretries: {max: 1}")).routing.policy == "random"
    assert it.applied == [it.reload.settings]
    assert it.reload.origins == {"routing.policy": "kvgate.yaml", "retries.max": "kvgate.yaml"}
    assert it.reload.needs_restart == ()
    await it.reload()
    assert it.reload.results == {Result.APPLIED: 1, Result.UNCHANGED: 1}
    assert len(it.applied) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("routing: {polcy: p2c}", "routing.polcy: unknown key; did you mean `policy`?"),
        ("routing: {policy: best}", "routing.policy: "),
        ("workers: [{url: 'http://a:1'}, {url: 'http://a:1'}]", "workers: http://a:1 is given twice"),
        ("routing: [", "kvgate.yaml: no valid YAML in line 2"),
        ("", "kvgate.yaml: is empty"),
    ],
)
async def test_a_broken_file_changes_nothing_and_a_good_one_heals(path: Path, text: str, problem: str) -> None:
    it = Stand(path, "routing: {policy: p2c}")
    with capture_logs() as logs:
        await it.says(text)
    assert problem in it.reload.problems[0]
    assert problem in str(logs)
    assert (it.applied, it.reload.settings.routing.policy) == ([], "p2c")
    assert it.reload.results == {Result.REFUSED: 1}
    assert (await it.says("routing: {policy: random}")).routing.policy == "random"
    assert it.reload.problems == ()


async def test_a_file_that_is_gone_changes_nothing(path: Path) -> None:
    it = Stand(path, "routing: {policy: p2c}")
    os.rename(path, path.with_suffix(".away"))
    await it.reload()
    assert "cannot be read" in it.reload.problems[0]
    assert it.applied == []


async def test_what_its_files_do_not_allow_changes_nothing(path: Path) -> None:
    it = Stand(path, "routing: {policy: p2c}")
    it.refuses = "models.llama: no such directory"
    await it.says("routing: {policy: random}\nmodels: [{name: llama, tokenizer: /nowhere}]")
    assert it.reload.problems == ("models.llama: no such directory",)
    assert (it.applied, it.reload.settings.routing.policy, it.reload.settings.models) == ([], "p2c", ())


async def test_a_bug_is_told_too(path: Path) -> None:
    it = Stand(path, "routing: {policy: p2c}")
    it.broken = True
    with pytest.raises(RuntimeError):
        await it.says("routing: {policy: random}")
    assert "a bug of the gateway" in it.reload.problems[0]
    assert it.reload.results == {Result.REFUSED: 1}
    assert it.reload.settings.routing.policy == "p2c"
    it.broken = False
    assert (await it.says("routing: {policy: random}")).routing.policy == "random"
    assert it.reload.problems == ()


async def test_what_needs_a_restart_is_named_and_stays(path: Path) -> None:
    it = Stand(path, "server: {port: 1}")
    settings = await it.says("server: {port: 2, receipts: false, tls: {cert: /c}}\ntelemetry: {log: console}")
    assert list(it.reload.needs_restart) == ["server.port", "server.tls.cert", "telemetry.log"]
    assert (settings.server.port, settings.server.tls.cert, settings.telemetry.log) == (1, None, "json")
    assert not settings.server.receipts
    await it.says("server: {port: 1, receipts: false}")
    assert not it.reload.needs_restart
    assert len(it.applied) == 1


async def test_what_does_not_go_with_what_stays_is_refused(path: Path) -> None:
    it = Stand(path, "server: {admin_host: 0.0.0.0}\nauth: {admin_token: hush}")
    await it.says("server: {admin_host: 127.0.0.1}")
    (problem,) = it.reload.problems
    assert "set auth.admin_token" in problem
    assert "server.admin_host can only change with a restart" in problem
    assert it.applied == []


async def test_environment_and_flags_still_win(path: Path) -> None:
    environ = {"KVGATE_RETRIES__MAX": "7"}
    it = Stand(path, "retries: {max: 1}", environ=environ, overrides={"routing": {"policy": "p2c"}})
    settings = await it.says("retries: {max: 3}\nrouting: {policy: random}\nhealth: {failures: 9}")
    assert (settings.retries.max, settings.routing.policy, settings.health.failures) == (7, "p2c", 9)


async def test_values_do_not_reach_the_log(path: Path) -> None:
    it = Stand(path, "auth: {admin_token: first-secret}")
    with capture_logs() as logs:
        await it.says("auth: {admin_token: second-secret}")
        await it.says("auth: {admin_token: [third-secret]}")
    assert "auth.admin_token" in str(logs)
    assert "secret" not in str(logs) + str(it.reload.problems)


def test_every_key_is_known_to_change_or_not() -> None:
    sections = set(Settings.model_fields)
    assert set(LIVE) <= sections
    for fixed in AT_START:
        assert any(key == fixed or key.startswith(f"{fixed}.") for key in all_keys()), fixed
    for key in all_keys():
        section = key.partition(".")[0]
        told = section in LIVE or section in AT_START
        assert told, f"{key}: say in runtime/reload.py whether it changes while the process runs"
    assert is_live("server.receipts")
    assert not is_live("server.port")
    assert not is_live("worker_tls.ca")
