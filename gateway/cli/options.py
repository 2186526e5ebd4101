"""What several commands share: the option that names the file, and how its mistakes are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.config import ConfigError, Loaded, Sources

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file (kvgate.yaml). Environment variables win over it."),
]


def read_or_exit(sources: Sources) -> Loaded:
    """The merged configuration; every mistake goes to stderr, one a line, and ends the command with code 2."""
    try:
        return sources.read()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"kvgate: {problem}", err=True)
        raise typer.Exit(2) from error
