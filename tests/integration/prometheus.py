"""A real Prometheus over one gateway: scrapes twice a second, so that minutes of its rules can pass as seconds."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.integration.rig import PATIENCE_S

SCRAPE = "500ms"


class Prometheus:
    """Its query interface."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        answer = (await self._http.get("/api/v1/query", params={"query": expr})).json()
        assert answer["status"] == "success", (expr, answer)
        return list(answer["data"]["result"])

    async def alerts(self) -> dict[str, list[dict[str, str]]]:
        """Labels of what is pending or firing, by alert."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in (await self._http.get("/api/v1/alerts")).json()["data"]["alerts"]:
            found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found


def sooner(rules: str, factor: float) -> str:
    """Rules with every length of time divided; what had to last must last no longer than one evaluation."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] / factor
        return f"{max(1, round(seconds * 1000))}ms"

    shortened = re.sub(r"\b(\d+)([smh])\b(?=[\])\s])", shorter, rules)
    return re.sub(r"^(\s+for:).*$", r"\1 0s", shortened, flags=re.MULTILINE)


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str], *, rules: str | None = None) -> AsyncIterator[Prometheus]:
    """A server that scrapes `targets` (base URLs); ends with the context."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "scrape_configs": [
            {"job_name": "kvgate", "static_configs": [{"targets": [urlsplit(url).netloc for url in targets]}]}
        ],
    }
    if rules is not None:
        (folder / "rules.yaml").write_text(rules)
        config["rule_files"] = [str(folder / "rules.yaml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as http:
            await _ready(http)
            yield Prometheus(http)
    finally:
        process.terminate()
        await process.wait()


async def _ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(3 * PATIENCE_S):
        while True:
            try:
                if (await http.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)


async def until_seen(look: Callable[[], Awaitable[bool]], *, within_s: float = 3 * PATIENCE_S) -> None:
    """Wait for what Prometheus has to scrape first."""
    async with asyncio.timeout(within_s):
        while not await look():  # noqa: ASYNC110  the condition is in another process
            await asyncio.sleep(0.25)
