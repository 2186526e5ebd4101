"""What several commands share: options, and how mistakes of the configuration are told.

As in all files of commands, what a command needs is imported when it runs: `kvgate --help` answers without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gateway.config import Loaded, Sources

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file (kvgate.yaml). Environment variables win over it."),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as it is, JSON.")]


def hands_over(context: typer.Context) -> bool:
    """Whether a subcommand does the work; it would not see options given before its name, so there may be none."""
    if context.invoked_subcommand is None:
        return False
    sources = [context.get_parameter_source(name) for name in context.params]
    if any(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise typer.BadParameter(f"options of {context.invoked_subcommand} go behind its name")
    return True


def read_or_exit(
    config: Path | None, overrides: Mapping[str, Any] | None = None, tokenizers: Mapping[str, Path] | None = None
) -> Loaded:
    """The merged configuration, its arguments those of `config.Sources`; see `loaded_or_exit`."""
    from gateway.config import Sources

    return loaded_or_exit(Sources(config, overrides or {}, tokenizers or {}))


def loaded_or_exit(sources: Sources) -> Loaded:
    """What they say together; every mistake goes to stderr, one a line, and ends the command with code 2."""
    from gateway.config import ConfigError

    try:
        return sources.read()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"kvgate: {problem}", err=True)
        raise typer.Exit(2) from error
