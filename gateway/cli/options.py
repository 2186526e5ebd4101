"""What several commands share: options, and how mistakes of the configuration are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.config import ConfigError, Loaded, Sources

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


def read_or_exit(sources: Sources) -> Loaded:
    """The merged configuration; every mistake goes to stderr, one a line, and ends the command with code 2."""
    try:
        return sources.read()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"kvgate: {problem}", err=True)
        raise typer.Exit(2) from error
