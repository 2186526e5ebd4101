"""The configuration in force, and its change while the process runs.

Rules:
1. All or nothing. The sources are read, merged and validated as at the start, and so are the files they name
   (tokenizers, keys), before anything changes; then every part is told in one synchronous step. What cannot be used
   changes nothing, and the log, `GET /admin/config` and a gauge say so, by the path of the key.
2. What cannot change while the process runs keeps its value and is named (`needs_restart`), until the file says again
   what is in force or the process is started anew. `AT_START` is the whole list; a section that is not in `LIVE` is not
   changed at all.
3. Environment and flags of the start still win over the file.
4. Requests that are open keep what they began with.

Values are never logged: they may be secrets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog
from pydantic import ValidationError

from gateway.config import ConfigError, Loaded, Sources, problems_of
from gateway.discovery import Source
from gateway.runtime.access import KeyTable
from gateway.runtime.models import Hashers
from gateway.settings import Settings, changed_keys, with_keys_of

LIVE = (
    "server",
    "auth",
    "models",
    "workers",
    "discovery",
    "routing",
    "admission",
    "index",
    "timeouts",
    "retries",
    "health",
    "load",
)
"""Sections that change while the process runs, but for these keys of theirs:"""

AT_START: Mapping[str, str] = {
    "server.host": "the port is bound at the start",
    "server.port": "the port is bound at the start",
    "server.admin_host": "the port is bound at the start",
    "server.admin_port": "the port is bound at the start",
    "server.tls.cert": "another certificate in the same file is used at once",
    "server.tls.key": "another key in the same file is used at once",
    "server.tls.client_ca": "read at the start",
    "server.admin_tls": "as those of the client port",
    "redis": "the connection is made at the start",
    "worker_tls": "a certificate renewed in the same file is used at once",
    "telemetry": "logs and traces are set up at the start",
}
"""Keys, or whole sections, that wait for the next start, and why."""


class Result(StrEnum):
    """What became of a reload."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read from files for a configuration that is about to be used, and the sources of workers it names."""

    hashers: Hashers
    keys: KeyTable
    sources: Sequence[Source]


def is_live(key: str) -> bool:
    """Whether a key (dotted path) changes while the process runs."""
    section = key.partition(".")[0]
    return section in LIVE and not any(key == fixed or key.startswith(f"{fixed}.") for fixed in AT_START)


class Reload:
    """What is in force. `prepare` reads files, in a thread, and raises ConfigError; `apply` tells every part."""

    def __init__(
        self,
        loaded: Loaded,
        sources: Sources | None,
        *,
        prepare: Callable[[Settings], Prepared],
        apply: Callable[[Settings, Prepared], None],
    ) -> None:
        self.settings = loaded.settings
        self.origins: Mapping[str, str] = loaded.origins
        self.needs_restart: tuple[str, ...] = ()
        """Keys whose value in the file is not the one in force."""
        self.problems: tuple[str, ...] = ()
        """Why the sources as they are now are not in force; empty when they are."""
        self.results: Counter[Result] = Counter()
        self._sources = sources
        self._prepare = prepare
        self._apply = apply
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("kvgate.config")

    async def __call__(self) -> None:
        """Read the sources again and use what they say (rule 1)."""
        if self._sources is None:
            return
        async with self._turn:
            try:
                result, changed = await self._renew(self._sources)
            except ConfigError as error:
                self.problems = tuple(error.problems)
                self.results[Result.REFUSED] += 1
                self._log.error("configuration refused: the one before stays in force", problems=error.problems[:10])
                return
            except Exception:
                # Told here, and logged with its traceback by whoever watches the file.
                self.problems = ("not used because of a bug of the gateway: its log has the traceback",)
                self.results[Result.REFUSED] += 1
                raise
            self.problems = ()
            self.results[result] += 1
            self._log.info(
                "configuration read", result=result.value, changed=changed, needs_restart=list(self.needs_restart)
            )

    async def _renew(self, sources: Sources) -> tuple[Result, list[str]]:
        loaded = await asyncio.to_thread(sources.read)
        different = changed_keys(self.settings, loaded.settings)
        path = sources.path
        if different and path is not None and path.name not in loaded.origins.values():
            # Cut short while it was written, most likely; as it stands it takes every worker out.
            raise ConfigError([f"{path}: is empty; restart the gateway to run without it"])
        waiting = [key for key in different if not is_live(key)]
        settings = _possible(loaded.settings, self.settings, waiting)
        prepared = await asyncio.to_thread(self._prepare, settings)
        # Nothing waits from here on: all of it is in force at the same moment.
        changed = changed_keys(self.settings, settings)
        self.needs_restart = tuple(waiting)
        self.origins = loaded.origins
        if not changed:
            return Result.UNCHANGED, changed
        self._apply(settings, prepared)
        self.settings = settings
        return Result.APPLIED, changed


def _possible(wanted: Settings, in_force: Settings, waiting: list[str]) -> Settings:
    """What is wanted, but for what has to wait. Raises ConfigError when the two do not go together."""
    if not waiting:
        return wanted
    mixed = with_keys_of(wanted, in_force, waiting)
    try:
        return Settings(**{name: getattr(mixed, name) for name in type(mixed).model_fields})
    except ValidationError as error:
        kept = ", ".join(waiting)
        raise ConfigError([f"{line} ({kept} can only change with a restart)" for line in problems_of(error)]) from error
