"""What differs between the engines a simulated worker can stand for, and between their releases.

Names of blocks on the wire: vLLM's are opaque (the simulation's own chain); SGLang's can be computed, so they are:
- 0.5.6 on: `digest_i = SHA-256(digest_{i-1} || tokens as u32 little-endian)`, the value is the first 8 bytes,
  big-endian and signed. From 0.5.18 on a cache salt starts the chain; before, it does not show. From 0.5.23 on an
  adapter's pages are hashed once more with a seed made of its id; before, it does not show.
- 0.4.8 to 0.5.5: Python's hash of the page's tokens alone.

Earlier SGLang releases, which announce tree nodes instead of pages, are not simulated.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from enum import StrEnum

Release = tuple[int, int, int]
"""Major, minor and patch number; what follows them in a version is of no matter here."""


class Dialect(StrEnum):
    """The engine a simulated worker speaks and behaves like."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def newest(self) -> str:
        """The version it shows when none is given."""
        return "0.32.0" if self is Dialect.VLLM else "0.5.23"

    def check(self, version: str) -> Release:
        """The release of a version. Raises ValueError for one that is not simulated."""
        release = release_of(version)
        first = (0, 9, 0) if self is Dialect.VLLM else (0, 4, 8)
        if release < first:
            raise ValueError(f"{self} {version} is not simulated; the first is {'.'.join(map(str, first))}")
        return release


def release_of(version: str) -> Release:
    """The leading numbers of a version, missing ones as 0. Raises ValueError when it starts with none."""
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def sglang_names(
    tokens: Sequence[int], page_size: int, release: Release, *, adapter: str | None = None, salt: str | None = None
) -> list[int]:
    """Names of the full pages of `tokens` as SGLang puts them into its events."""
    pages = [tokens[start : start + page_size] for start in range(0, len(tokens) - page_size + 1, page_size)]
    if release < (0, 5, 6):
        return [hash(tuple(page)) for page in pages]
    digest = b""
    if salt is not None and release >= (0, 5, 18):
        digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode("utf-8", "replace")).digest()
    seed = None if adapter is None or release < (0, 5, 23) else _adapter_seed(adapter)
    names: list[int] = []
    for page in pages:
        digest = hashlib.sha256(digest + struct.pack(f"<{page_size}I", *page)).digest()
        name = digest[:8]
        if seed is not None:
            name = hashlib.sha256(seed + name).digest()[:8]
        names.append(int.from_bytes(name, "big", signed=True))
    return names


def _adapter_seed(adapter: str) -> bytes:
    """Of an adapter's id, which SGLang draws at random; here it follows from the name."""
    identity = hashlib.sha256(adapter.encode("utf-8", "replace")).hexdigest()[:32].encode()
    parts = b"\1" + len(identity).to_bytes(8, "little") + identity + b"\0"
    return hashlib.sha256(b"sglang-kv-event-namespace-v1" + parts).digest()
