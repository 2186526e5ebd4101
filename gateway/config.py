"""Reading the configuration: the only reader of the environment and of files, and the words for what is wrong there.

Order, later wins: defaults, `kvgate.yaml`, environment (`KVGATE_SECTION__KEY`), command line. An unknown key or a wrong
value stops the start; the message names the key's path and what would be right. The sections are in `gateway/settings`.
"""

from __future__ import annotations

import difflib
import errno
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import EnvSettingsSource

from gateway.credentials import MAX_KEYS, KeySettings
from gateway.settings import ENV_PREFIX, Settings

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A file of ten thousand keys takes the loader in Python seconds."""

MAX_FILE_BYTES = 64 << 20
"""Of a file; a hundred thousand keys with limits take some twenty megabytes."""

MAX_FILE_VALUES = 2_000_000
"""Of a YAML file, those that aliases repeat counted each time: nine lines can say a thousand million."""

_SILENT_PIPE_S = 5.0


COMMAND_LINE = "command line"


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one line each, with the path of the key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the sources say together. `origins` tells where each given key came from, by its dotted path (a list is one
    key): the file's name, the variable's, or `command line`; what is not there has its default. `replaced` are the keys
    that an earlier source gave too, with that source."""

    settings: Settings
    origins: Mapping[str, str]
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the configuration comes from. `overrides`, of the command line, is nested like the file and wins;
    `tokenizers` (served name -> directory) are given there too, and change or add entries of `models`."""

    path: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)  # noqa: TID251  the one reader
    account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Where Kubernetes puts what a pod needs to talk to its API server."""

    def read(self) -> Loaded:
        """Read them all, now. Raises ConfigError naming every wrong key."""
        tree: dict[str, Any] = {}
        origins: dict[str, str] = {}
        replaced: dict[str, str] = {}
        from_file = _read_yaml(self.path) if self.path is not None else {}
        from_environ = _read_environ(self.environ)
        for given, of in (
            (from_file, dict.fromkeys(_leaves(from_file), self.path.name if self.path is not None else "")),
            (from_environ, {leaf: _variable(leaf, self.environ) for leaf in _leaves(from_environ)}),
            (self.overrides, dict.fromkeys(_leaves(self.overrides), COMMAND_LINE)),
        ):
            _merge(tree, given)
            replaced.update({leaf: origins[leaf] for leaf in of if leaf in origins})
            origins.update(of)
        if self.tokenizers and isinstance(tree.get("models", ()), list | tuple):
            tree["models"] = _with_tokenizers(tree.get("models", ()), self.tokenizers)
            origins["models"] = f"{origins['models']}, {COMMAND_LINE}" if "models" in origins else COMMAND_LINE
        origins.update(_in_cluster(tree, self.environ, self.account))
        try:
            return Loaded(Settings(**tree), origins, replaced)
        except ValidationError as error:
            raise ConfigError(problems_of(error)) from error


def load(
    path: Path | None = None, *, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read file, environment and command line into one tree, once. Raises ConfigError naming every wrong key."""
    sources = Sources(path, overrides or {})
    return (sources if environ is None else replace(sources, environ=environ)).read().settings


_API_HOST, _API_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


def _in_cluster(tree: dict[str, Any], env: Mapping[str, str], account: Path) -> dict[str, str]:
    """What a pod finds out by itself is filled in where `discovery.kubernetes` leaves it open; where it comes from."""
    discovery = tree.get("discovery")
    section = discovery.get("kubernetes") if isinstance(discovery, dict) else None
    if not isinstance(section, dict) or section.get("api_server") is not None or _API_HOST not in env:
        return {}
    host = env[_API_HOST]
    found = {
        "api_server": (f"https://{f'[{host}]' if ':' in host else host}:{env.get(_API_PORT, '443')}", _API_HOST),
        "token_file": (str(account / "token"), account.name),
        "ca_file": (str(account / "ca.crt"), account.name),
    }
    if section.get("namespace") is None:
        try:
            found["namespace"] = ((account / "namespace").read_text(encoding="utf-8").strip(), account.name)
        except OSError as error:
            raise ConfigError([f"discovery.kubernetes.namespace: {account}: {error.strerror}; give it"]) from error
    missing = {key: value for key, (value, _) in found.items() if section.get(key) is None}
    section.update(missing)
    return {f"discovery.kubernetes.{key}": found[key][1] for key in missing}


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


def read_file(path: Path) -> bytes:
    """Its content, at most MAX_FILE_BYTES. Raises OSError, also for a pipe into which nobody writes: a thread that
    waited there would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        content = bytearray()
        while len(content) <= MAX_FILE_BYTES:
            if not ready.poll(_SILENT_PIPE_S * 1000):
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))
            part = file.read(1 << 20)
            if not part:
                return bytes(content)
            content += part
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loader = _YAML(read_file(path).decode("utf-8"))
        node = loader.get_single_node()
        if node is not None and _values(node, {}) > MAX_FILE_VALUES:
            raise ConfigError([f"{path}: has more than {MAX_FILE_VALUES:,} values, or aliases that repeat as many"])
        tree = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: it quotes the line, which may hold a secret.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError([f"{path}: no valid YAML{line}: {error.problem}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path}: no valid YAML: {type(error).__name__}"]) from None
    except ValueError:
        # The error's own text has the value.
        raise ConfigError([f"{path}: no valid YAML: a number or date is out of range"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError([f"{path}: expected sections such as `server:` at the top"])
    # A section that is there but empty (`auth:`) means its defaults.
    return {key: value for key, value in tree.items() if value is not None}


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, those that aliases repeat counted each time; `known` are those counted."""
    if id(node) not in known:
        known[id(node)] = MAX_FILE_VALUES + 1  # one that contains itself has no end of them
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = (part for pair in parts for part in pair)
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


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


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of what is given in a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _variable(leaf: str, env: Mapping[str, str]) -> str:
    """The variable that gave a key, or a section around it as JSON."""
    parts = leaf.split(".")
    wanted = {f"{ENV_PREFIX}{'__'.join(parts[:n])}".lower(): n for n in range(1, len(parts) + 1)}
    return max((name for name in env if name.lower() in wanted), key=lambda name: wanted[name.lower()])


def _with_tokenizers(models: Sequence[Any], given: Mapping[str, Path]) -> list[Any]:
    """The entries of `models`, those of the names given with their directory, and a new one for each further name."""
    left = dict(given)
    entries = []
    for entry in models:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        entries.append({**entry, "tokenizer": left.pop(name)} if name in left else entry)
    return entries + [{"name": name, "tokenizer": directory} for name, directory in left.items()]


_BRANCHES = frozenset({"[key]", "constrained-int", "str", "constrained-float", "float", "literal['auto']"})
_PLAIN_WORDS = {
    "missing": "is missing",
    "tuple_type": "expected a list, each entry behind a `-`",
    "model_type": "expected keys, such as `port: 8000` in a section",
    "path_type": "expected a path",
    "string_type": "expected text; on, off, yes, no and numbers are text only in quotes",
    "string_pattern_mismatch": "expected 1 to 64 letters, digits, dots, dashes or underscores",
}
"""What pydantic says in words of its own, by type of error."""


def problems_of(error: ValidationError) -> list[str]:
    """One line a key: where several forms of a value are possible, pydantic has a complaint for each."""
    lines: dict[str, list[str]] = {}
    for each in error.errors():
        path, _, said = _explain(dict(each)).partition(": ")
        lines.setdefault(path, []).append(said)
    return [f"{path}: {', or '.join(said)}" for path, said in lines.items()]


def _explain(error: dict[str, Any], root: type[BaseModel] = Settings) -> str:
    loc = [str(part) for part in error["loc"] if part not in _BRANCHES]
    path = ".".join(loc)
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key{_near(loc[-1], _keys_at(loc[:-1], root))}"
    said = _PLAIN_WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    # What must hold between sections names its key itself.
    return f"{path}: {said}" if path else said


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
