"""Sections of what is behind the gateway: `models`, `workers`, `health`, `load`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from gateway.pool import MAX_WORKERS, Route, Shadow, Version
from gateway.records import EngineKind, RankChoice, Role, WorkerId, WorkerSpec
from gateway.settings.section import BearerToken, Seconds, Section, why

_WRITTEN = re.compile(r"""[^\x00-\x20\x7f-\xa0"'<>\\^`{|}\ud800-\udfff]+""")
"""Everything but white space, control characters, and what RFC 3986 allows nowhere. Letters of all alphabets stay: a
host may have such a name."""

_YAML_OFF = WithJsonSchema({"anyOf": [{"type": "string"}, {"const": False}]})
"""YAML 1.1 reads a bare `off` as false."""


class VersionSettings(Section):
    """One of several served names that requests for a model are divided among."""

    model: str = Field(min_length=1, description="The name workers serve it under.")
    weight: float = Field(1.0, ge=0, le=1_000_000, description="Its share, relative to the others'.")


class ShadowSettings(Section):
    """A served name that gets copies of requests; their answers are dropped."""

    model: str = Field(min_length=1, description="The name workers serve it under.")
    share: float = Field(0.01, gt=0, le=1, description="Share of the requests that are copied.")


class ModelSettings(Section):
    """One model: where its tokenizer lies and how its prompts are cut."""

    name: str = Field(
        min_length=1,
        description="The name workers serve it under (see `/v1/models`); `*`: every model without an entry.",
    )
    aliases: tuple[str, ...] = Field(
        (),
        description="Other names of it: served ones share its tokenizer, requests for one that no worker serves are "
        "sent on under `name`.",
    )
    versions: tuple[VersionSettings, ...] = Field(
        (), description="Served names that its requests are divided among by weight; a session keeps to one."
    )
    shadow: ShadowSettings | None = Field(None, description="Copies some of its requests to another served name.")
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

    @model_validator(mode="after")
    def _routable(self) -> ModelSettings:
        names = [version.model for version in self.versions]
        if len(names) != len(set(names)):
            raise ValueError("versions: one model is named twice")
        if names and not any(version.weight for version in self.versions):
            raise ValueError("versions: every weight is 0, so that nobody would get a request")
        if self.name == "*" and (names or self.shadow is not None or self.aliases):
            raise ValueError("`aliases`, `versions` and `shadow` need a name, not `*`")
        return self

    @property
    def says_how_to_cut(self) -> bool:
        """Whether it says where token ids come from; else that is found out from the workers."""
        return self.tokenizer is not None or self.chat_template is not None or self.tokenize_at != "here"

    def routes(self) -> dict[str, Route]:
        """What its names stand for, where they do not stand for themselves."""
        shadow = Shadow(self.shadow.model, self.shadow.share) if self.shadow is not None else None
        versions = tuple(Version(v.model, v.weight) for v in self.versions) or (Version(self.name),)
        route = Route(versions, shadow)
        names = self.aliases if not self.versions and shadow is None else (self.name, *self.aliases)
        return dict.fromkeys(names, route)


class WorkerTraits(Section):
    """What is said of a worker beside its address; `auto` and none mean: learn it by probing the URL."""

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
    kv_events: Annotated[str, _YAML_OFF] = Field(
        "auto",
        description="ZMQ endpoint of its KV events (rank 0's; each further rank is one port up), `auto`, or `off`.",
    )
    kv_replay: Annotated[str, _YAML_OFF] = Field(
        "auto", description="ZMQ endpoint of the event replay (the same), `auto`, or `off`."
    )
    data_parallel_size: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="Data-parallel ranks behind the URL; none: as it says."
    )
    ranks: RankChoice = Field(
        RankChoice.AUTO,
        description="`each` data-parallel rank is a worker of its own, or all are `one`; `auto`: each, where the "
        "engine's release takes the rank's header (vLLM 0.11.1, SGLang 0.5.10).",
    )
    api_key: BearerToken | None = Field(
        None, description="Sent to the worker as bearer token instead of the client's; none: the client's goes through."
    )
    tenants: tuple[str, ...] = Field(
        (), description="Tenants (of API keys) whose requests it gets, nobody else's; none: everybody's."
    )
    weight: float = Field(1.0, gt=0, le=1000, description="Share under `least_load`, `random`, `p2c`, `prefix_hash`.")

    @field_validator("kv_events", "kv_replay", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value in ("auto", "off") or value.startswith(("tcp://", "ipc://", "inproc://")):
            return value
        raise ValueError("expected `auto`, `off` or an endpoint such as tcp://10.0.0.1:5557")

    def as_spec(self, name: str, url: str) -> WorkerSpec:
        """A worker of that name and address as the runtime takes it."""
        return WorkerSpec(
            name=WorkerId(name),
            url=url,
            engine=EngineKind.UNKNOWN if self.engine == "auto" else EngineKind(self.engine),
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
            tenants=frozenset(self.tenants),
        )


class WorkerSettings(WorkerTraits):
    """One worker; `auto` and none mean: learn it by probing the URL."""

    url: str = Field(description="Base URL, such as http://10.0.0.1:8000.")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Shown in metrics, logs and `x-kvgate-worker`; none: w1, w2, ... in the order given.",
    )

    @field_validator("url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        return worker_url(value)

    def spec(self, taken: set[str]) -> WorkerSpec:
        """The worker as the runtime takes it; without a name it is called w1, w2, ..."""
        return self.as_spec(self.name or default_worker_name(taken), self.url)


class HealthSettings(Section):
    """When a worker gets no requests because they fail there, and how it comes back."""

    failures: int = Field(
        5,
        ge=1,
        le=1000,
        description="Failed requests, less those answered meanwhile, that eject a worker.",
        json_schema_extra=why("one bad request does not eject a worker, a broken one loses a handful"),
    )
    open_s: Seconds = Field(
        10,
        description="How long it is left alone before a trial; each failed one doubles that, up to 16 times.",
        json_schema_extra=why("about what an engine needs to get over an overload"),
    )
    probe_s: Seconds = Field(
        10,
        description="Seconds between two probes of a worker, and the limit of a trial.",
        json_schema_extra=why(
            "what a probe finds (adapters, versions) changes seldom; the data path notices at once that nobody listens"
        ),
    )
    panic_ratio: float = Field(
        0.5,
        ge=0,
        le=1,
        description="When more than this share of a pool is ejected, all of it is used; 1: never.",
        json_schema_extra=why("with half of a pool gone, the load on the rest breaks more than failed requests do"),
    )
    slow_start_s: Seconds = Field(
        10,
        description="How long the requests of a recovered worker are limited.",
        json_schema_extra=why("a worker that has come back has a cold cache and perhaps the old fault"),
    )


class LoadSettings(Section):
    """How the load of workers is known: by polls of what they say about themselves, or by their load sockets."""

    poll_s: Seconds = Field(
        1,
        description="Seconds between two polls of one worker; one that is idle is polled every third time.",
        json_schema_extra=why("between two polls our own counts say what we have added"),
    )
    sockets: bool = Field(
        True,
        description="Listen to workers that publish their load (SGLang from 0.5.19 on with `--load-publish-endpoint`); "
        "their polls come a fifteenth as often while they are heard.",
    )


_SECRET_PART = re.compile(r"(?<=//).*(?=@)|^(?!\w+://).*(?=@)|(?<=[?#]).*", re.DOTALL)
"""Of a URL: user and password, the query, the fragment."""


def worker_url(value: str) -> str:
    """A worker's base URL without a trailing slash. Raises ValueError saying what a right one looks like;
    who has written a password or a query into it does not find that in a log."""
    shown = repr(_SECRET_PART.sub("...", value))
    if not _WRITTEN.fullmatch(value):  # what urlsplit would leave out, or resolvers stumble over
        raise ValueError(f"{shown} holds a character that no URL has; expected one like http://10.0.0.1:8000")
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{shown}: the port is no number from 1 to 65535") from error
    if port == 0:
        raise ValueError(f"{shown}: the port is no number from 1 to 65535")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{shown} is no worker URL; expected one like http://10.0.0.1:8000")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{shown}: give the base URL only, without path, query or user (http://10.0.0.1:8000)")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{shown}: {parts.hostname!r} cannot be the name of a host ({error})") from error
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def default_worker_name(taken: set[str]) -> str:
    """The first free of w1, w2, ...: names go to clients, addresses do not."""
    return next(name for name in (f"w{number}" for number in itertools.count(1)) if name not in taken)


def _or_probe(endpoint: str) -> str | None:
    return None if endpoint == "auto" else ("" if endpoint == "off" else endpoint)
