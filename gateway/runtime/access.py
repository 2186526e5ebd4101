"""The API keys in force: of the configuration, and of the file that `auth.keys_file` names, which may change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from gateway.config import ConfigError, read_keys
from gateway.credentials import KeySettings
from gateway.edge import Access, Keys
from gateway.settings import AuthSettings

_LOOK_EVERY_S = 1.0

FileState = tuple[int, int, int]


class KeysInForce:
    """`keys` is what requests are checked against, None where no keys are asked for.

    A file that cannot be used changes nothing: the keys before stay, and the log says what is wrong with it, once for
    each state of the file.
    """

    def __init__(self, settings: AuthSettings) -> None:
        """Reads the file. Raises ConfigError."""
        self._settings = settings
        self._path = settings.keys_file
        self._seen = file_state(self._path)
        self._log = structlog.get_logger("kvgate.keys")
        self.keys = Keys(self._read()) if settings.checks_keys else None

    async def watch(self) -> None:
        """Read the file again whenever it has changed; looked at every second."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file again if it has changed."""
        state = file_state(self._path)
        if state == self._seen or self.keys is None:
            return
        self._seen = state
        try:
            entries = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._log.error("keys file not used: the keys before stay in force", problems=error.problems[:10])
            return
        self.keys.replace(entries)
        self._log.info("keys file read", keys=len(entries))

    def _read(self) -> dict[bytes, Access]:
        """Of two entries for one key the file's counts. Raises ConfigError, also for a key that a file has twice."""
        from_file = read_keys(self._path) if self._path is not None else ()
        access = {entry.digest: _access(entry) for entry in self._settings.keys}
        seen = set()
        for number, entry in enumerate(from_file):
            if entry.digest in seen:
                raise ConfigError([f"{self._path}: keys.{number}.hash: this key stands above already"])
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
    )


def file_state(path: Path | None) -> FileState | None:
    """What tells one state of a file from another; None when there is none to be seen."""
    if path is None:
        return None
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
