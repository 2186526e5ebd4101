"""The API keys in force: of the configuration, and of the file that `auth.keys_file` names; both may change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from gateway.config import ConfigError, read_keys
from gateway.credentials import KeySettings
from gateway.edge import Access, Keys
from gateway.settings import AuthSettings

KeyTable = dict[bytes, Access]
"""What each key allows, by its digest."""


_LEAST = {"high": None, "normal": 0, "low": 1}
"""Lowest `priority` of each class."""


class KeysInForce:
    """`keys` is what requests are checked against, None where no keys are asked for.

    A file that cannot be used changes nothing: the keys before stay, and the log says what is wrong with it, once for
    each content of the file.
    """

    def __init__(self, settings: AuthSettings) -> None:
        """Reads the file. Raises ConfigError."""
        self._settings = settings
        self._log = structlog.get_logger("kvgate.keys")
        self.keys: Keys | None = None
        self.apply(settings, key_table(settings))

    def files(self) -> list[Path]:
        """The file, if there is one."""
        return [self._settings.keys_file] if self._settings.keys_file is not None else []

    def apply(self, settings: AuthSettings, table: KeyTable) -> None:
        """These from now on; keys that stay keep what is left of their rates."""
        self._settings = settings
        if not settings.checks_keys:
            self.keys = None
        elif self.keys is None:
            self.keys = Keys(table)
        else:
            self.keys.replace(table)

    async def look(self) -> None:
        """Read the file again."""
        settings = self._settings
        if self.keys is None or settings.keys_file is None:
            return
        try:
            table = await asyncio.to_thread(key_table, settings)
        except ConfigError as error:
            self._log.error("keys file not used: the keys before stay in force", problems=error.problems[:10])
            return
        if settings is self._settings:  # else the configuration has changed meanwhile, and read the file
            self.apply(settings, table)
            self._log.info("keys file read", keys=len(table))


def key_table(settings: AuthSettings) -> KeyTable:
    """All keys; of two entries for one key the file's counts. Raises ConfigError, also for a key that a file has
    twice."""
    path = settings.keys_file
    try:
        from_file = read_keys(path) if path is not None else ()
    except ConfigError as error:
        raise ConfigError([f"auth.keys_file: {problem}" for problem in error.problems]) from error
    access = {entry.digest: _access(entry) for entry in settings.keys}
    seen = set()
    for number, entry in enumerate(from_file):
        if entry.digest in seen:
            raise ConfigError([f"auth.keys_file: {path}: keys.{number}.hash: this key stands above already"])
        seen.add(entry.digest)
        access[entry.digest] = _access(entry)
    return access


def _access(entry: KeySettings) -> Access:
    return Access(
        entry.tenant,
        frozenset(entry.models) if entry.models is not None else None,
        entry.requests_per_minute,
        entry.tokens_per_minute,
        frozenset(entry.pools) if entry.pools is not None else None,
        _LEAST[entry.best_class],
    )
