"""The command `kvgate`: one file a group of subcommands, no logic of its own.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

from gateway.cli.app import main

__all__ = ["main"]
