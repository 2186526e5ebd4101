"""Configuration: one frozen tree, validated at start; the only reader of the environment and of files.

Rules:
1. Order, later wins: defaults, `kvgate.yaml`, environment (`KVGATE_SECTION__KEY`), command line.
2. An unknown key or a wrong value stops the start; the message names the key's path and what would be right.
3. A key exists only when it does something.
4. Secrets are `SecretStr`: printing the tree masks them.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.credentials import MAX_KEYS, KeySettings, ServerTls, WorkerTls
from gateway.pool import MAX_WORKERS
from gateway.records import Endpoint, EngineKind, RankChoice, Role, WorkerId, WorkerSpec

ENV_PREFIX = "KVGATE_"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Weight = Literal["auto"] | Annotated[float, Field(ge=0, le=1_000, allow_inf_nan=False)]
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A file of ten thousand keys takes the loader in Python seconds."""

POLICIES = ("seconds", "least_load", "round_robin", "random", "p2c", "prefix_hash")


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one line each, with the path of the key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """The two ports and the limits of the client port."""

    host: str = Field("0.0.0.0", description="Address the client port binds.")
    port: Port = Field(8000, description="Client port; 0 takes a free one.")
    admin_host: str = Field("127.0.0.1", description="Address the admin port binds; loopback by default.")
    admin_port: Port = Field(8001, description="Admin port; 0 takes a free one.")
    drain_timeout_s: Seconds = Field(30, description="How long open requests may finish after SIGTERM.")
    header_timeout_s: Seconds = Field(10, description="A client must have sent its request header by then.")
    body_timeout_s: Seconds = Field(60, description="A client must have sent its request body by then.")
    idle_timeout_s: Seconds = Field(75, description="A client's connection may wait this long for its next request.")
    max_body_bytes: int = Field(67_108_864, ge=1024, le=1 << 31, description="Largest request body.")
    max_header_bytes: int = Field(65_536, ge=1024, le=1 << 24, description="Largest request header.")
    max_buffered_bytes: int = Field(
        1_073_741_824,
        ge=1024,
        le=1 << 40,
        description="Request bodies in memory, all together; what comes beyond is refused with 503.",
    )
    max_connections: int = Field(
        16_384, ge=1, le=1_000_000, description="Open connections of clients; one more is refused with 503."
    )
    tls: ServerTls = ServerTls()
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose web pages may use the client port, such as https://chat.example.com; `*`: all."
    )
    receipts: bool = Field(True, description="Send x-kvgate-* headers with each answer.")
    ready_timeout_s: Seconds = Field(
        30, description="Report ready after this long even when an index is still catching up."
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value != "*" and not re.fullmatch(r"https?://[^/\s?#@*]+", value):
                raise ValueError(f"{value!r} is no origin; expected one like https://chat.example.com, or `*`")
        return values


class AuthSettings(_Section):
    """Who may use the two ports. With `keys_file` or `keys` every request to a model needs an API key."""

    keys_file: Path | None = Field(
        None,
        description="YAML file with API keys, hashed; read again when it changes. One list, `keys`, whose entries have "
        "`hash`, `tenant` and, if limited, `models`, `requests_per_minute`, `tokens_per_minute`.",
    )
    keys: tuple[KeySettings, ...] = Field(
        (), description="The same entries, beside the file; here `key`, the key itself, may stand for `hash`."
    )
    tenant_salt: bool = Field(
        False, description="Give each tenant a cache salt of its own: no tenant can time what another has asked."
    )
    admin_token: SecretStr | None = Field(
        None, description="Bearer token of the admin port; none: no check, and only for the machine itself."
    )
    admin_open: bool = Field(
        False, description="Let the admin port be reached from elsewhere without a token: the network is trusted."
    )

    @field_validator("admin_token")
    @classmethod
    def _not_empty(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value():
            raise ValueError("is empty; give a token, or leave the key out to have no check")
        return value

    @property
    def checks_keys(self) -> bool:
        """Requests to models need an API key."""
        return self.keys_file is not None or bool(self.keys)

    @model_validator(mode="after")
    def _salt_needs_tenants(self) -> AuthSettings:
        if self.tenant_salt and not self.checks_keys:
            raise ValueError("tenant_salt: without `keys_file` or `keys` there are no tenants")
        return self


class ModelSettings(_Section):
    """One model: where its tokenizer lies and how its prompts are cut."""

    name: str = Field(
        min_length=1,
        description="The name workers serve it under (see `/v1/models`); `*`: every model without an entry.",
    )
    aliases: tuple[str, ...] = Field((), description="Other served names of the same model, sharing its tokenizer.")
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json, tokenizer_config.json and chat_template.jinja."
    )
    tokenize_at: str = Field(
        "here",
        description="Where token ids come from: `here`, `worker` (its render or tokenise endpoint), or the URL of a "
        "render server. Engines are asked in the background; until they have told, prompts go by their text.",
    )
    chat_template: Path | None = Field(None, description="Template file that replaces the tokenizer's own.")
    block_size: int | None = Field(
        None, ge=1, le=65_536, description="Tokens a block of the keys; none: learned from the workers."
    )

    @model_validator(mode="after")
    def _one_tokenizer(self) -> ModelSettings:
        if self.tokenize_at not in ("here", "worker"):
            worker_url(self.tokenize_at)
        if self.tokenize_at != "here" and self.tokenizer is not None:
            raise ValueError("`tokenizer` is not used with `tokenize_at`; leave one of them out")
        return self


class WorkerSettings(_Section):
    """One worker; `auto` and none mean: learn it by probing the URL."""

    url: str = Field(description="Base URL, such as http://10.0.0.1:8000.")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Shown in metrics, logs and `x-kvgate-worker`; none: w1, w2, ... in the order given.",
    )
    engine: Literal["auto", "vllm", "sglang"] = Field("auto", description="The software it runs.")
    pool: str = Field("default", description="Label `pool` of its metrics and decisions; requests go by model.")
    role: Role = Field(
        Role.BOTH,
        description="`both`, `prefill` or `decode`. Only workers that do both get requests; others are watched.",
    )
    models: tuple[str, ...] = Field(
        (), description="Served names it gets requests for, adapters included; none: all it names."
    )
    block_size: int | None = Field(
        None, ge=1, le=65_536, description="Tokens of its KV blocks (vLLM) or pages (SGLang); none: as it says."
    )
    kv_blocks: int | None = Field(
        None, ge=1, le=1 << 32, description="Blocks its cache holds, all ranks together; none: as it says."
    )
    kv_events: str = Field(
        "auto",
        description="ZMQ endpoint of its KV events (rank 0's; each further rank is one port up), `auto`, or `off`.",
    )
    kv_replay: str = Field("auto", description="ZMQ endpoint of the event replay (the same), `auto`, or `off`.")
    data_parallel_size: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="Data-parallel ranks behind the URL; none: as it says."
    )
    ranks: RankChoice = Field(
        RankChoice.AUTO,
        description="`each` data-parallel rank is a worker of its own, or all are `one`; `auto`: each, where the "
        "engine's release takes the rank's header (vLLM 0.11.1, SGLang 0.5.10).",
    )
    api_key: SecretStr | None = Field(
        None, description="Sent to the worker as bearer token instead of the client's; none: the client's goes through."
    )
    weight: float = Field(1.0, gt=0, le=1000, description="Share under `least_load`, `random`, `p2c`, `prefix_hash`.")

    @field_validator("url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        return worker_url(value)

    @field_validator("kv_events", "kv_replay", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if value is False else value

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value in ("auto", "off") or value.startswith(("tcp://", "ipc://", "inproc://")):
            return value
        raise ValueError("expected `auto`, `off` or an endpoint such as tcp://10.0.0.1:5557")

    def spec(self, taken: set[str]) -> WorkerSpec:
        """The worker as the runtime takes it; without a name it is called w1, w2, ..."""
        engine = EngineKind.UNKNOWN if self.engine == "auto" else EngineKind(self.engine)
        name = self.name or default_worker_name(taken)
        return WorkerSpec(
            name=WorkerId(name),
            url=self.url,
            engine=engine,
            pool=self.pool,
            role=self.role,
            models=self.models,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            kv_events=_or_probe(self.kv_events),
            kv_replay=_or_probe(self.kv_replay),
            data_parallel_size=self.data_parallel_size,
            ranks=self.ranks,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            weight=self.weight,
        )


class AffinitySettings(_Section):
    """Where a request's session id is read, and how long a session is remembered."""

    header: str = Field("x-session-id", description="Request header that carries the session id.")
    body_field: str | None = Field(None, description="Top-level body field that carries it, when the header is absent.")
    ttl_s: Seconds = Field(3600, description="A session without requests is forgotten after this long.")
    max_sessions: int = Field(1_000_000, ge=0, description="Sessions remembered; the oldest go first.")


class RoutingSettings(_Section):
    """How a worker is chosen: `score = alpha*hit - beta*queue - gamma*load`, in seconds."""

    policy: Literal["seconds", "least_load", "round_robin", "random", "p2c", "prefix_hash"] = Field(
        "seconds", description="The policy; `seconds` is the cache-aware one."
    )
    alpha: Weight = Field("auto", description="Scales what a hit saves; auto is 1 on learned rates.")
    beta: Weight = Field("auto", description="Scales the wait; auto is 1.")
    gamma: Weight = Field("auto", description="Scales the prices of decode, eviction and occupancy; auto is 1.")
    speculative_ttl_s: Seconds = Field(2, description="How long a sent prompt counts as held without an event.")
    affinity: AffinitySettings = AffinitySettings()


class IndexSettings(_Section):
    """What is known of the workers' caches."""

    max_bytes: int = Field(
        2_147_483_648,
        ge=1_048_576,
        description="Memory for the index; above it the coldest blocks of the fullest worker are let go.",
    )
    route_miss_threshold: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of a worker's predicted hits that may be missed; above it its refresh is tightened.",
    )
    approximate_ttl_s: Seconds = Field(
        600, description="How long a block learned from routing (a worker without events) counts without being used."
    )
    approximate_tokens: int = Field(
        262_144, ge=1024, le=1 << 40, description="Cache of a worker that does not report its size, in tokens."
    )
    offload_ttl_s: Seconds = Field(
        3600,
        description="How long a block counts in a store that never says what it drops (LMCache, Mooncake, offload to "
        "disk or objects), since it was last announced.",
    )


class PhaseSettings(_Section):
    """What differs from `timeouts` for one path or model."""

    connect_s: Seconds | None = None
    send_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    total_s: Seconds | None = None

    def changes(self) -> dict[str, float]:
        """Those that are given, by name."""
        return self.model_dump(exclude_none=True)


class TimeoutSettings(_Section):
    """Deadlines of the phases on the worker's side (`docs/concepts/life-of-a-request.md`)."""

    connect_s: Seconds = Field(2, description="Connection to a worker.")
    send_s: Seconds = Field(30, description="Until the worker has taken a request that it does not take at once.")
    first_byte_s: Seconds = Field(
        120, description="From the request sent until the answer begins, a stream with the first byte of its body."
    )
    idle_s: Seconds = Field(60, description="Between two pieces of an answer, and for a client that takes nothing.")
    total_s: Seconds = Field(
        1800, description="The whole request, retries included; a client's header `x-request-timeout-s` may shorten it."
    )
    paths: dict[Endpoint, PhaseSettings] = Field(
        {}, description="What differs by path: `{/v1/embeddings: {first_byte_s: 10, total_s: 30}}`."
    )
    models: dict[str, PhaseSettings] = Field({}, description="What differs by served model name; wins over the path's.")


class RetrySettings(_Section):
    """Other workers tried before the first byte."""

    max: int = Field(2, ge=0, le=10, description="Further workers tried when one cannot be reached, breaks or is busy.")
    budget_ratio: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Retries after failures, as a share of a pool's requests in the last 10 s; ten more are always "
        "allowed. Moving on from a worker that has no room (429, 503 with Retry-After) is not counted.",
    )


class HealthSettings(_Section):
    """When a worker gets no requests because they fail there, and how it comes back."""

    failures: int = Field(
        5, ge=1, le=1000, description="Failed requests, less those answered meanwhile, that eject a worker."
    )
    open_s: Seconds = Field(
        10, description="How long it is left alone before a trial; each failed one doubles that, up to 16 times."
    )
    probe_s: Seconds = Field(10, description="Seconds between two probes of a worker, and the limit of a trial.")
    panic_ratio: float = Field(
        0.5, ge=0, le=1, description="When more than this share of a pool is ejected, all of it is used; 1: never."
    )
    slow_start_s: Seconds = Field(10, description="How long the requests of a recovered worker are limited.")


class LoadSettings(_Section):
    """Polling of the workers' /metrics."""

    poll_s: Seconds = Field(1, description="Seconds between two polls of one worker.")


class TelemetrySettings(_Section):
    """Logs."""

    log: Literal["json", "console"] = Field("json", description="Form of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level written.")


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    models: tuple[ModelSettings, ...] = ()
    workers: tuple[WorkerSettings, ...] = ()
    worker_tls: WorkerTls = WorkerTls()
    routing: RoutingSettings = RoutingSettings()
    index: IndexSettings = IndexSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    load: LoadSettings = LoadSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` merged: it reads the sources itself to keep their order and to name bad keys."""
        return (init_settings,)

    @model_validator(mode="after")
    def _names_once(self) -> Settings:
        names = [w.name for w in self.workers if w.name]
        for name in {n for n in names if names.count(n) > 1}:
            raise ValueError(f"workers: the name {name!r} is used twice")
        urls = [w.url for w in self.workers]
        for url in {url for url in urls if urls.count(url) > 1}:
            raise ValueError(f"workers: {url} is given twice")
        server = self.server
        if server.port and server.port == server.admin_port:
            raise ValueError(f"server: port and admin_port are both {server.port}; choose another admin_port")
        auth = self.auth
        if auth.admin_token is None and not auth.admin_open and not is_loopback(server.admin_host):
            raise ValueError(
                f"server.admin_host: {server.admin_host} can be reached from elsewhere: set auth.admin_token, or "
                "auth.admin_open where the network is trusted"
            )
        served = [n for m in self.models for n in (m.name, *m.aliases)]
        for name in {n for n in served if served.count(n) > 1}:
            raise ValueError(f"models: the name {name!r} is used twice")
        return self

    def worker_specs(self) -> list[WorkerSpec]:
        """The configured workers, each with a name of its own."""
        taken = {w.name for w in self.workers if w.name}
        specs = []
        for worker in self.workers:
            spec = worker.spec(taken)
            taken.add(spec.name)
            specs.append(spec)
        return specs


def load(
    path: Path | None = None, *, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read file, environment and command line into one tree. `overrides` is nested like the file and wins.

    Raises ConfigError naming every wrong key.
    """
    env = os.environ if environ is None else environ  # noqa: TID251  this is the one reader of the environment
    tree: dict[str, Any] = {}
    if path is not None:
        _merge(tree, _read_yaml(path))
    _merge(tree, _read_environ(env))
    _merge(tree, dict(overrides or {}))
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise ConfigError([_explain(dict(e)) for e in error.errors()]) from error


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeySettings, ...] = Field(max_length=MAX_KEYS)


def read_keys(path: Path) -> tuple[KeySettings, ...]:
    """The entries of a keys file. Raises ConfigError naming every wrong one, without its hash."""
    tree = _read_yaml(path)
    tree.setdefault("keys", ())
    try:
        keys = _KeysFile(**tree).keys
    except ValidationError as error:
        raise ConfigError([f"{path}: {_explain(dict(e), _KeysFile)}" for e in error.errors()]) from None
    plain = [number for number, entry in enumerate(keys) if entry.key is not None]
    if plain:
        raise ConfigError([f"{path}: keys.{n}.key: give the key's `hash`, not the key itself" for n in plain])
    return keys


def worker_url(value: str) -> str:
    """A worker's base URL without a trailing slash. Raises ValueError saying what a right one looks like."""
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{value!r}: the port is no number from 1 to 65535") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is no worker URL; expected one like http://10.0.0.1:8000")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{value!r}: give the base URL only, without path, query or user (http://10.0.0.1:8000)")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def is_loopback(host: str) -> bool:
    """Whether only the machine itself can reach what binds `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_worker_name(taken: set[str]) -> str:
    """The first free of w1, w2, ...: names go to clients, addresses do not."""
    return next(name for name in (f"w{number}" for number in itertools.count(1)) if name not in taken)


def _or_probe(endpoint: str) -> str | None:
    return None if endpoint == "auto" else ("" if endpoint == "off" else endpoint)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_YAML)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: it quotes the line, which may hold a secret.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError([f"{path}: no valid YAML{line}: {error.problem}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: no valid YAML: {type(error).__name__}"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError([f"{path}: expected sections such as `server:` at the top"])
    # A section that is there but empty (`auth:`) means its defaults.
    return {key: value for key, value in tree.items() if value is not None}


def _read_environ(env: Mapping[str, str]) -> dict[str, Any]:
    sections = set(Settings.model_fields)
    problems = []
    for name in env:
        if name.upper().startswith(ENV_PREFIX):
            section = name[len(ENV_PREFIX) :].split("__", 1)[0].lower()
            if section not in sections:
                problems.append(f"{name}: unknown section `{section}`{_near(section, sections)}")
    if problems:
        raise ConfigError(problems)
    source = EnvSettingsSource(Settings)
    source.env_vars = {k.lower(): v for k, v in env.items()}
    try:
        return source()
    except ValueError as error:  # a list section that is no JSON
        raise ConfigError([f"environment: {error}; lists are given as JSON"]) from error


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        have = into.get(key)
        if isinstance(value, Mapping) and have is not None:
            if isinstance(have, dict):
                _merge(have, value)
            # Else the earlier source has a plain value where a section belongs: kept, so that it is refused by name.
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


_BRANCHES = frozenset({"[key]", "constrained-float", "float", "literal['auto']"})
_PLAIN_WORDS = {
    "missing": "is missing",
    "tuple_type": "expected a list, each entry behind a `-`",
    "model_type": "expected keys, such as `port: 8000` in a section",
    "path_type": "expected a path",
    "string_type": "expected text; on, off, yes, no and numbers are text only in quotes",
    "string_pattern_mismatch": "expected 1 to 64 letters, digits, dots, dashes or underscores",
}
"""What pydantic says in words of its own, by type of error."""


def _explain(error: dict[str, Any], root: type[BaseModel] = Settings) -> str:
    loc = [str(part) for part in error["loc"] if part not in _BRANCHES]
    path = ".".join(loc) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key{_near(loc[-1], _keys_at(loc[:-1], root))}"
    said = _PLAIN_WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return f"{path}: {said}"


def _keys_at(path: list[str], root: type[BaseModel]) -> set[str]:
    model: Any = root
    any_key = False
    for part in path:
        if part.isdigit() or any_key:
            any_key = False
            continue
        annotation = model.model_fields[part].annotation
        args = getattr(annotation, "__args__", ())
        any_key = getattr(annotation, "__origin__", None) is dict
        model = args[any_key] if args else annotation
    return set(model.model_fields)


def _near(key: str, known: set[str]) -> str:
    match = difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean `{match[0]}`?" if match else f"; known: {', '.join(sorted(known))}"
