"""Files that may change while the process runs: noticed, and whoever uses them is told.

Rules:
1. A file is looked at every `every_s` seconds, by `stat` through links: a file that is renamed over another and a
   directory of links that is swapped as a whole (Kubernetes mounts) are seen like one that is written in place. It is
   read only when that shows something, and whoever watches it is told only when the content is another. Both in a
   thread: a file may be on a server that hangs.
2. A file that was changed is left alone until two looks in a row show the same: one that is being written in place
   would be read in half, and half a list of workers is a valid list.
3. `now` (SIGHUP) does not wait and tells everybody, whatever the files look like.
4. One watch for the process. What fails in telling one does not keep the others from being told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from gateway.config import read_file

LOOK_EVERY_S = 2.0
_SETTLES_IN_S = 0.2


class Look(NamedTuple):
    """How a file looks from outside; all 0 for one that is not there."""

    changed_ns: int = 0
    inode_changed_ns: int = 0
    size: int = 0
    inode: int = 0
    device: int = 0


@dataclass(slots=True)
class _Watched:
    name: str
    paths: Callable[[], Sequence[Path]]
    changed: Callable[[], Awaitable[None]]
    told: dict[Path, Look]
    """How the files looked when they were used last."""
    digest: bytes
    settling: dict[Path, Look] | None = None
    """How they looked a moment ago, while they change."""


class FileWatch:
    """`add` what is to be watched, then `run`."""

    def __init__(self, *, every_s: float = LOOK_EVERY_S) -> None:
        self._every_s = every_s
        self._watched: list[_Watched] = []
        self._asked = asyncio.Event()
        self._log = structlog.get_logger("kvgate.files")

    def add(self, name: str, paths: Callable[[], Sequence[Path]], changed: Callable[[], Awaitable[None]]) -> None:
        """`changed` is awaited when one of the files is not what it was. Which files these are may change."""
        now = paths()
        self._watched.append(_Watched(name, paths, changed, _looks(now), _digest(now)))

    def now(self) -> None:
        """Look at once and tell everybody."""
        self._asked.set()

    async def run(self) -> None:
        """Never returns."""
        while True:
            settling = any(watched.settling is not None for watched in self._watched)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLES_IN_S if settling else self._every_s):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            await self.look(asked=asked)

    async def look(self, *, asked: bool = False) -> None:
        """Look at all files once; `asked`: tell everybody."""
        for watched in self._watched:
            if asked or await self._settled(watched):
                watched.told, watched.settling = await asyncio.to_thread(_looks, watched.paths()), None
                watched.digest = await asyncio.to_thread(_digest, watched.paths())
                try:
                    await watched.changed()
                except Exception:  # noqa: BLE001  rule 4; whoever is told has a word for what it expects
                    self._log.exception("a changed file could not be used", what=watched.name)

    async def _settled(self, watched: _Watched) -> bool:
        """Whether there is another content to be used now."""
        looks = await asyncio.to_thread(_looks, watched.paths())
        if looks == watched.told:
            watched.settling = None
            return False
        if looks != watched.settling:
            watched.settling = looks
            return False
        if await asyncio.to_thread(_digest, watched.paths()) == watched.digest:
            watched.told, watched.settling = looks, None  # touched, or replaced by the same
            return False
        return True


def _looks(paths: Sequence[Path]) -> dict[Path, Look]:
    return {path: _look(path) for path in paths}


def _look(path: Path) -> Look:
    try:
        stat = path.stat()
    except OSError:
        return Look()
    return Look(stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)


def _digest(paths: Sequence[Path]) -> bytes:
    """Of names and contents; a file that cannot be read counts as one that is not there."""
    content = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            data = read_file(path)
        except OSError:
            data = b"\x00gone"
        content.update(f"{path}\n{len(data)}\n".encode("utf-8", "surrogateescape"))
        content.update(data)
    return content.digest()
