"""`kvgate config check|show|schema`: what a configuration says, before anything runs with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.options import ConfigOption, read_or_exit

if TYPE_CHECKING:
    from gateway.config import Loaded
    from gateway.settings import DiscoverySettings, Settings

config_commands = typer.Typer(
    help="Check the configuration, show what it comes to, print its schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@config_commands.command()
def check(
    config: ConfigOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when there are warnings.")] = False,
) -> None:
    """Say whether the gateway would start with this file and environment, and what would run.

    Files it names are read too: tokenizers, keys, certificates. Every mistake is one line with the path of its key; so
    is every value that is valid and looks wrong. No port is opened and no worker is asked: that does kvgate doctor.

    Exit code: 0 ok, 1 warnings with --strict, 2 mistakes.
    """
    from gateway.runtime.preflight import doubts, mistakes

    loaded = read_or_exit(config)
    found = mistakes(loaded.settings)
    for problem in found:
        typer.echo(f"kvgate: {problem}", err=True)
    warnings = doubts(loaded, config)
    for warning in warnings:
        typer.echo(f"kvgate: warning: {warning}", err=True)
    if found:
        raise typer.Exit(2)
    typer.echo("ok")
    for name, value in _summary(loaded, config):
        typer.echo(f"{name:<8} {value}")
    raise typer.Exit(1 if strict and warnings else 0)


@config_commands.command()
def show(
    config: ConfigOption = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only keys that were given and differ from their default.")
    ] = False,
    as_json: JsonOption = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print plain YAML, without where it came from.")] = False,
) -> None:
    """Print the merged configuration, secrets masked, and where each given value came from.

    The order of the sources, later wins: defaults, the file, the environment, flags of kvgate serve. What a running
    gateway uses, flags included, is at GET /admin/config.
    """
    loaded = read_or_exit(config)
    tree = loaded.settings.model_dump(mode="json", exclude_unset=changed)
    if changed:
        tree = _given(tree, loaded.origins)
    if as_json:
        typer.echo(json.dumps({"settings": tree, "origins": dict(loaded.origins)}, indent=2))
        return
    lines = list(_lines(tree, loaded.origins if not as_yaml else {}))
    typer.echo("\n".join(lines) if lines else "{}")


@config_commands.command()
def schema() -> None:
    """Print the JSON schema of the file, which editors complete and check it with.

    kvgate config schema > kvgate.schema.json, and as the first line of kvgate.yaml:

    # yaml-language-server: $schema=kvgate.schema.json
    """
    from gateway.settings import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def _summary(loaded: Loaded, path: Path | None) -> Iterator[tuple[str, str]]:
    settings = loaded.settings
    workers = [spec.name for spec in settings.worker_specs()]
    sources = list(_found_by(settings.discovery))
    if workers or not sources:
        yield "workers", _counted(workers) if workers else "none: give them here, by --worker, or at /admin/workers"
    if sources:
        yield "found by", ", ".join(sources)
    yield "models", _counted([model.name for model in settings.models]) if settings.models else "as the workers say"
    yield "policy", settings.routing.policy
    yield "clients", _address(settings)
    server = settings.server
    scheme = "https" if server.admin_tls.cert is not None else "http"
    yield "admin", f"{scheme}://{server.admin_host}:{server.admin_port}"
    variables = sorted({origin for origin in loaded.origins.values() if origin.upper().startswith("KVGATE_")})
    files = [str(path)] if path is not None else []
    yield "sources", ", ".join([*files, *variables]) or "defaults only"


def _found_by(discovery: DiscoverySettings) -> Iterator[str]:
    """Where workers come from that the configuration does not name."""
    yield from (f"dns {entry.name}" for entry in discovery.dns)
    if discovery.kubernetes is not None:
        yield f"kubernetes {discovery.kubernetes.kind} {discovery.kubernetes.selector}"
    if discovery.registry is not None:
        yield "registry"


def _address(settings: Settings) -> str:
    server = settings.server
    scheme = "https" if server.tls.cert is not None else "http"
    keys = "API keys asked for" if settings.auth.checks_keys else "no API keys asked for"
    return f"{scheme}://{server.host}:{server.port}, {keys}"


def _counted(names: Sequence[str], most: int = 8) -> str:
    more = f", ... ({len(names)})" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _given(tree: dict[str, Any], origins: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The part of a tree that some source gave."""
    part = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in origins:
            part[key] = value
        elif isinstance(value, dict) and (inner := _given(value, origins, f"{path}.")):
            part[key] = inner
    return part


def _lines(tree: dict[str, Any], origins: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    """The tree as YAML; behind each value, or before each list, where it came from."""
    import yaml

    for key, value in tree.items():
        path = f"{prefix}{key}"
        origin = f"  # {origins[path]}" if path in origins else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:{origin}"
            yield from _lines(value, origins, f"{path}.", indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{key}:{origin}"
            text = yaml.safe_dump(value, sort_keys=False, default_flow_style=False)
            yield from (f"{indent}  {line}" for line in text.splitlines())
        else:
            shown = yaml.safe_dump({key: value}, sort_keys=False, width=1_000, default_flow_style=False).strip()
            yield f"{indent}{shown}{origin}"
