"""Configuration: order of the sources, and that every mistake names the path of its key."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.config import MAX_FILE_BYTES, ConfigError, Sources, load
from gateway.credentials import key_hash
from gateway.pool.fleet import MAX_WORKERS
from gateway.records import Endpoint, EngineKind, RankChoice, WorkerId, WorkerSpec
from gateway.settings import Settings, default_worker_name, worker_url


def problems_of(**kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvgate.yaml"
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, "server: {host: file, port: 1, admin_port: 7}\n")
    settings = load(
        path,
        environ={"KVGATE_SERVER__PORT": "2", "KVGATE_SERVER__HOST": "env", "HOME": "/"},
        overrides={"server": {"host": "flag"}},
    )
    assert (settings.server.host, settings.server.port, settings.server.admin_port) == ("flag", 2, 7)


def test_sections_left_empty_are_their_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "auth:\nserver:\n"), environ={}) == load(environ={})


def test_nested_environment_and_json_lists() -> None:
    settings = load(
        environ={
            "KVGATE_ROUTING__AFFINITY__TTL_S": "5",
            "KVGATE_WORKERS": '[{"url": "http://a:1", "engine": "sglang"}]',
        }
    )
    assert settings.routing.affinity.ttl_s == 5
    assert settings.worker_specs()[0].engine is EngineKind.SGLANG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {prot: 1}", "server.prot: unknown key; did you mean `port`?"),
        ("sever: {}", "sever: unknown key; did you mean `server`?"),
        ("routing: {affinity: {heeader: x}}", "routing.affinity.heeader: unknown key; did you mean `header`?"),
        ("workers: [{url: 'http://a:1', nmae: w}]", "workers.0.nmae: unknown key; did you mean `name`?"),
        ("server: {port: 70000}", "server.port: "),
        ("routing: {alpha: .nan}", "routing.alpha: "),
        ("workers: [{url: 'http://a:1/v1'}]", "give the base URL only"),
        (
            "server: {admin_host: 0.0.0.0}",
            "server.admin_host: 0.0.0.0 can be reached from elsewhere: set auth.admin_token",
        ),
        ("server: {admin_host: kvgate.internal}", "can be reached from elsewhere"),
        ("server: {cors_origins: ['https://a/b']}", "'https://a/b' is no origin"),
        ("server: {cors_origins: ['a.example']}", "'a.example' is no origin"),
        ("server: {cors_origins: ['https://*.example']}", "is no origin"),
        ("server: {tls: {key: k.pem}}", "server.tls: `cert` is missing"),
        ("server: {tls: {crt: k.pem}}", "server.tls.crt: unknown key; did you mean `cert`?"),
        ("worker_tls: {key: k.pem}", "worker_tls: `cert` is missing"),
        ("auth: {tenant_salt: true}", "auth: tenant_salt: without `keys_file` or `keys` there are no tenants"),
        ("auth: {keys: [{tenant: a}]}", "auth.keys.0: give `hash`, or `key`, and not both"),
        ("auth: {keys: [{tenant: a, key: short-and-secret}]}", "auth.keys.0.key: expected 20 or more ASCII characters"),
        ("auth: {keys: [{tenant: 'a b', key: kvg-0123456789abcdefghij}]}", "auth.keys.0.tenant: expected 1 to 64"),
        ("auth: {keys: [{tenan: a, key: kvg-0123456789abcdefghij}]}", "auth.keys.0.tenan: unknown key; did you mean"),
        ("auth: {keys: [{tenant: a, hash: abc, requests_per_minute: 0}]}", "auth.keys.0.requests_per_minute: "),
        ("workers: [{url: 'http://a:1', name: off}]", "workers.0.name: expected text; on, off, yes, no"),
        ("workers: [{url: 'ftp://a'}]", "is no worker URL"),
        ("workers: [{url: 'http://a:1', kv_events: 'a:5557'}]", "expected `auto`, `off` or an endpoint"),
        ("workers: [{url: 'http://a:1', name: w}, {url: 'http://b:1', name: w}]", "'w' is used twice"),
        ("workers: [{url: 'http://a:1'}, {url: 'http://a:1/'}]", "http://a:1 is given twice"),
        (
            "retries: {hedge_percentile: 0.2}",
            "retries.hedge_percentile: expected 0 (off), or a share from 0.5 to 0.999",
        ),
        ("retries: {hedge_percentile: 95}", "retries.hedge_percentile: expected a share, not 95: 95 % is 0.95"),
        ("retries: {models: {m: {hedge_floor: 1}}}", "retries.models.m.hedge_floor: unknown key; did you mean"),
        ("retries: {max: 0, paths: {/v1/score: {hedge_percentile: 0.9}}}", "is one of `max`: allow at least 1"),
        ("server: {port: 8100, admin_port: 8100}", "server: port and admin_port are both 8100"),
        ("models: [{name: m}, {name: n, aliases: [m]}]", "'m' is used twice"),
        ("- a", "expected sections"),
        ("server: [", "no valid YAML"),
    ],
)
def test_a_mistake_names_its_key(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems_of(path=write(tmp_path, text), environ={})


def test_a_value_where_a_section_belongs_is_refused_though_flags_fill_the_section(tmp_path: Path) -> None:
    path = write(tmp_path, "server: 3\n")
    assert "server: " in problems_of(path=path, environ={}, overrides={"server": {"port": 1}})
    assert "server: " in problems_of(path=path, environ={}, overrides={"server": {}})


def test_unknown_environment_keys_are_refused() -> None:
    assert "KVGATE_SERVR__PORT: unknown section `servr`" in problems_of(environ={"KVGATE_SERVR__PORT": "1"})
    assert "server.prot: unknown key" in problems_of(environ={"KVGATE_SERVER__PROT": "1"})
    assert "lists are given as JSON" in problems_of(environ={"KVGATE_WORKERS": "http://a"})


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    assert "cannot be read" in problems_of(path=tmp_path / "none.yaml", environ={})


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases that repeat as many"),
        ("server: &s {host: *s}\n", "aliases that repeat as many"),
        ("server: {port: " + "9" * 6000 + "}\n", "no valid YAML: a number or date is out of range"),
        ("server: {port: 2020-99-99}\n", "no valid YAML: a number or date is out of range"),
        ("server: " + "[" * 20_000, "no valid YAML"),
    ],
    ids=["aliases", "itself", "number", "date", "deep"],
)
def test_a_file_that_would_take_all_memory_or_time_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems_of(path=write(tmp_path, text), environ={})


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    os.truncate(path, MAX_FILE_BYTES + 1)
    assert "cannot be read: File too large" in problems_of(path=path, environ={})
    assert "/dev/zero: cannot be read: File too large" in problems_of(path=Path("/dev/zero"), environ={})


def test_a_pipe_into_which_nobody_writes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.config._SILENT_PIPE_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "cannot be read: Connection timed out" in problems_of(path=pipe, environ={})


def test_a_pipe_can_be_the_file() -> None:
    read, write_to = os.pipe()
    os.write(write_to, b"server: {port: 7}\n")
    os.close(write_to)
    try:
        assert load(Path(f"/dev/fd/{read}"), environ={}).server.port == 7
    finally:
        os.close(read)


def test_aliases_are_good_for_what_workers_have_in_common(tmp_path: Path) -> None:
    text = "workers:\n  - &one {url: 'http://a:1', pool: big}\n  - {<<: *one, url: 'http://b:1'}\n"
    assert [worker.pool for worker in load(write(tmp_path, text), environ={}).workers] == ["big", "big"]


def test_secrets_are_masked_and_reach_the_spec() -> None:
    settings = load(
        environ={
            "KVGATE_AUTH__ADMIN_TOKEN": "top-secret",
            "KVGATE_WORKERS": '[{"url": "http://a:1", "api_key": "hidden"}]',
        }
    )
    assert "top-secret" not in repr(settings)
    assert "hidden" not in repr(settings) + settings.model_dump_json() + repr(settings.worker_specs())
    assert settings.worker_specs()[0].api_key == "hidden"


def test_round_trip() -> None:
    tree = load(environ={}).model_dump()
    assert Settings(**tree) == load(environ={})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://w/", "http://w"),
        ("https://[::1]:443", "https://[::1]:443"),
    ],
)
def test_worker_urls(given: str, url: str) -> None:
    assert worker_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "http://user:secret@h:8000",
        "http://:secret@h:8000",
        "http://user:sec/secret@h:8000",
        "user:secret@h",
        "http://user:secret @h",
        "http://user:secret@h:99999999",
        "http://h:8000?key=secret",
        "http://h:8000/#secret",
    ],
)
def test_a_secret_in_a_worker_url_is_refused_and_not_repeated(given: str) -> None:
    """The text goes to the log and to the admin port."""
    with pytest.raises(ValueError, match="h") as error:
        worker_url(given)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        "http://\0",
        "http://a\n",
        "http://a b",
        "http://a\ud800",
        "http://a..b",
        f"http://{'a' * 64}",
        "http://a:0",
        "http://a:65536",
    ],
)
def test_what_is_no_worker_url_is_told(given: str) -> None:
    with pytest.raises(ValueError, match=r"no URL has|cannot be the name of a host|from 1 to 65535"):
        worker_url(given)


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000", True),
        ("0.0.0.0", "localhost:8000", True),
        ("::", "http://[::1]:8000", True),
        ("127.0.0.1", "http://localhost:8000", True),
        ("127.0.0.1", "http://127.0.0.1:8001", True),
        ("127.0.0.1", "http://0.0.0.0:8000", True),
        ("10.0.0.1", "http://10.0.0.1:8000", True),
        ("127.0.0.1", "http://127.0.0.2:8000", False),
        ("127.0.0.1", "http://127.0.0.1:8002", False),
        ("10.0.0.1", "http://127.0.0.1:8000", False),
        ("0.0.0.0", "http://10.0.0.1:8000", False),
    ],
)
def test_the_gateway_is_no_worker_of_itself(host: str, url: str, own: bool) -> None:
    given = {"server": {"host": host}, "workers": [{"url": url}]}
    if own:
        assert "is the gateway itself (server." in problems_of(environ={}, overrides=given)
    else:
        load(environ={}, overrides=given)


def test_a_host_may_have_a_name_of_other_letters() -> None:
    assert worker_url("http://bücher.example:1") == "http://bücher.example:1"


def test_as_many_workers_as_a_fleet_holds() -> None:
    """Five thousand cost no more than reading them."""
    given = [{"url": f"http://a{number}:1"} for number in range(MAX_WORKERS)]
    names = [spec.name for spec in load(environ={}, overrides={"workers": given}).worker_specs()]
    assert (names[0], names[-1], len(set(names))) == ("w1", f"w{MAX_WORKERS}", MAX_WORKERS)
    more = [{"url": f"http://a{number}:1"} for number in range(5000)]
    assert "workers: " in problems_of(environ={}, overrides={"workers": more})
    assert "at most 1024" in problems_of(environ={}, overrides={"workers": more})


def test_default_names_are_distinct() -> None:
    given = [{"url": "http://a:1"}, {"url": "http://b:1", "name": "w1"}, {"url": "http://c:1"}]
    settings = load(environ={}, overrides={"workers": given})
    assert [spec.name for spec in settings.worker_specs()] == ["w2", "w1", "w3"]
    assert default_worker_name({"w1", "w3"}) == "w2"


@pytest.mark.parametrize("token", ["hidden\n", "hid\r\nx-more: den", "hidd\u00e9n", "hidden hidden"])
def test_a_token_that_fits_no_header_is_refused_and_not_shown(token: str) -> None:
    """The client would say it again in its error, and our own connection would send its line break."""
    overrides = {"auth": {"admin_token": token}, "workers": [{"url": "http://a:1", "api_key": token}]}
    said = problems_of(overrides=overrides, environ={})
    assert [line.partition(":")[0] for line in said.splitlines()] == ["auth.admin_token", "workers.0.api_key"]
    assert "hid" not in said


@pytest.mark.parametrize("endpoint", ["collector:4318", "https://me:hidden@collector"])
def test_a_collector_is_a_url_without_secrets(endpoint: str) -> None:
    """What the configuration holds in clear text is shown on the admin port."""
    said = problems_of(overrides={"telemetry": {"otlp_endpoint": endpoint}}, environ={})
    assert said.startswith("telemetry.otlp_endpoint: expected a URL such as")
    assert "hidden" not in said


def test_an_empty_admin_token_is_no_way_to_open_the_port() -> None:
    """An environment variable that was left empty, mostly."""
    with pytest.raises(ConfigError) as error:
        load(environ={"KVGATE_AUTH__ADMIN_TOKEN": ""})
    assert error.value.problems == ["auth.admin_token: is empty; give a token, or leave the key out to have no check"]


def test_a_number_for_a_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected sections"):
        load(write(tmp_path, "8000: 1"), environ={})


def test_what_overrides_a_workers_own_words(tmp_path: Path) -> None:
    text = (
        "workers:\n"
        "  - {url: 'http://a:1', models: [m], block_size: 32, kv_blocks: 100, data_parallel_size: 2, ranks: one,\n"
        "     kv_events: off, kv_replay: 'tcp://a:5657'}\n"
        "  - {url: 'http://b:1'}\n"
    )
    given, found = load(write(tmp_path, text), environ={}).worker_specs()
    assert (given.models, given.block_size, given.kv_blocks) == (("m",), 32, 100)
    assert (given.data_parallel_size, given.ranks) == (2, RankChoice.ONE)
    assert (given.kv_events, given.kv_replay) == ("", "tcp://a:5657")  # a bare `off` is no boolean here
    assert found == WorkerSpec(WorkerId("w2"), "http://b:1")


def test_keys_come_from_the_environment_and_are_masked() -> None:
    secret = "kvg-0123456789abcdefghij"
    settings = load(environ={"KVGATE_AUTH__KEYS": f'[{{"key": "{secret}", "tenant": "a", "models": ["m"]}}]'})
    assert settings.auth.checks_keys
    assert settings.auth.keys[0].digest.hex() == key_hash(secret)
    for shown in (repr(settings), str(settings.model_dump(mode="json")), settings.model_dump_json()):
        assert secret not in shown


def test_no_message_repeats_a_secret(tmp_path: Path) -> None:
    secret = "kvg-0123456789abcdefghij"
    broken = (
        f"auth: {{admin_token: [{secret}]}}",
        f"auth: {{keys: [{{key: {secret}, hash: {secret}, tenant: a}}]}}",
        f"auth: {{keys: [{{hash: {secret}, tenant: a}}]}}",
        f"auth: {{keys: {secret}}}",
        f"auth:\n  admin_token: {secret}\n :x: {secret}: [",
        f"workers: [{{url: 'http://a:1', api_key: [{secret}]}}]",
    )
    for text in broken:
        assert secret not in problems_of(path=write(tmp_path, text), environ={}), text
    assert secret not in problems_of(environ={"KVGATE_AUTH__KEYS": f'[{{"key": "{secret}"'})


@pytest.mark.parametrize(
    "text",
    [
        "server: {admin_host: 127.0.0.1}",
        "server: {admin_host: '::1'}",
        "server: {admin_host: localhost}",
        "{server: {admin_host: 0.0.0.0}, auth: {admin_token: t0ken}}",
        "{server: {admin_host: 0.0.0.0}, auth: {admin_open: true}}",
    ],
)
def test_the_admin_port_is_the_machines_own_or_guarded_or_open_by_word(text: str, tmp_path: Path) -> None:
    assert load(write(tmp_path, text), environ={}).server.admin_host


def test_limits_by_path_and_model(tmp_path: Path) -> None:
    text = "timeouts: {idle_s: 5, paths: {/v1/score: {total_s: 3}}, models: {m: {idle_s: 7, connect_s: 1}}}\n"
    timeouts = load(write(tmp_path, text), environ={}).timeouts
    assert timeouts.paths[Endpoint.SCORE].changes() == {"total_s": 3}
    assert timeouts.models["m"].changes() == {"idle_s": 7, "connect_s": 1}
    for wrong, said in (
        (
            "paths: {/v1/scores: {total_s: 3}}",
            "timeouts.paths./v1/scores: Input should be '/v1/chat/completions', '/v1/completions'",
        ),
        ("paths: {/v1/score: {totals: 3}}", "timeouts.paths./v1/score.totals: unknown key; did you mean `total_s`?"),
        ("models: {m: {first_byte: 3}}", "timeouts.models.m.first_byte: unknown key; did you mean `first_byte_s`?"),
        ("models: {m: {idle_s: 0}}", "timeouts.models.m.idle_s"),
    ):
        assert said in problems_of(path=write(tmp_path, f"timeouts: {{{wrong}}}\n"), environ={})


def test_each_given_key_has_an_origin(tmp_path: Path) -> None:
    path = write(tmp_path, "server: {host: file, port: 1}\ntimeouts: {paths: {/v1/embeddings: {total_s: 9}}}\n")
    environ = {"KVGATE_SERVER__PORT": "2", "kvgate_retries": '{"max": 1}', "HOME": "/"}
    loaded = Sources(path, {"server": {"admin_port": 3}}, environ=environ).read()
    assert loaded.origins == {
        "server.host": "kvgate.yaml",
        "server.port": "KVGATE_SERVER__PORT",
        "server.admin_port": "command line",
        "timeouts.paths./v1/embeddings.total_s": "kvgate.yaml",
        "retries.max": "kvgate_retries",
    }


def test_tokenizers_of_the_command_line_join_the_models_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "models: [{name: a, aliases: [b], tokenizer: /old}, {name: c}]\n")
    loaded = Sources(path, tokenizers={"a": Path("/new"), "*": Path("/all")}, environ={}).read()
    assert [(m.name, m.aliases, m.tokenizer) for m in loaded.settings.models] == [
        ("a", ("b",), Path("/new")),
        ("c", (), None),
        ("*", (), Path("/all")),
    ]
    assert loaded.origins["models"] == "kvgate.yaml, command line"
