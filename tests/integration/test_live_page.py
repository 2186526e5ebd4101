"""The live page in a real browser: it starts, follows traffic, opens a decision, asks for the token, and complains of
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.integration.rig import PATIENCE_S, Rig, rig
from tests.integration.test_observed import traffic


class Browser:
    """A headless Chromium. Its driver waits by itself, so every step is made on a thread."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    async def do(self, step: Callable[[Chrome], Any]) -> Any:
        return await asyncio.to_thread(step, self._driver)

    async def until(self, condition: Callable[[Chrome], Any]) -> Any:
        return await self.do(lambda driver: WebDriverWait(driver, 3 * PATIENCE_S, 0.1).until(condition))

    async def text(self, place: str) -> str:
        return str(await self.do(lambda driver: driver.find_element(By.CSS_SELECTOR, place).text))

    async def complaints(self) -> list[str]:
        return [str(entry["message"]) for entry in await self.do(_log)]


def _log(driver: Chrome) -> Any:
    return driver.get_log("browser")  # type: ignore[no-untyped-call]


@asynccontextmanager
async def browser(folder: Path, *, width: int = 1200) -> AsyncIterator[Browser]:
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--no-proxy-server",
        f"--user-data-dir={folder}",
        f"--window-size={width},1000",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = await asyncio.to_thread(Chrome, options=options, service=ChromeService("/usr/bin/chromedriver"))
    try:
        yield Browser(driver)
    finally:
        await asyncio.to_thread(driver.quit)


def shown(place: str) -> Callable[[Chrome], Any]:
    return lambda driver: [found for found in driver.find_elements(By.CSS_SELECTOR, place) if found.is_displayed()]


async def ask(running: Rig, prompt: list[int]) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
    return await running.http.post("/v1/completions", json=body)


async def test_the_page_follows_what_happens(tmp_path: Path) -> None:
    async with rig(2) as running, browser(tmp_path) as page:
        await page.do(lambda driver: driver.get(running.ports.admin_url + "/"))
        await page.until(shown("#fleet td"))
        assert await page.text("#ready") == "ready"
        assert "w1" in await page.text("#fleet")
        assert await page.text("#decisions") == "None yet."
        assert not (await page.do(lambda driver: driver.find_element(By.ID, "ask-token").is_displayed()))

        async with traffic(running):
            await page.until(lambda driver: "%" in driver.find_element(By.ID, "funnel").text)
            await page.until(shown("#decisions details"))
        await page.do(lambda driver: driver.find_element(By.CSS_SELECTOR, "#decisions summary").click())
        table = await page.until(shown("#decisions table"))
        rows = await page.do(lambda _: table[0].text)
        assert {"w1", "w2"} <= set(rows.split())
        assert (await page.do(lambda _: len(table[0].find_elements(By.CSS_SELECTOR, "tr.chosen")))) == 1
        # It stays open while the rest is drawn again.
        await asyncio.sleep(2.5)
        assert await page.do(lambda driver: shown("#decisions table")(driver))
        assert await page.complaints() == []


async def test_words_from_outside_are_never_markup(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    async with rig(1, each=[{"model": name}]) as running, browser(tmp_path) as page:
        body = {"model": name, "prompt": [1] * 40, "max_tokens": 2}
        assert (await running.http.post("/v1/completions", json=body)).status_code == 200
        await page.do(lambda driver: driver.get(running.ports.admin_url + "/"))
        await page.until(shown("#decisions details"))
        assert name in await page.text("#decisions")
        assert await page.do(lambda driver: driver.find_elements(By.TAG_NAME, "img")) == []


async def test_the_page_asks_for_the_token_and_keeps_it_for_the_tab(tmp_path: Path) -> None:
    async with (
        rig(1, settings={"auth": {"admin_token": "open-sesame"}}, wait=True) as running,
        browser(tmp_path) as page,
    ):
        await page.do(lambda driver: driver.get(running.ports.admin_url + "/"))
        await page.until(shown("#ask-token"))
        assert not await page.do(lambda driver: shown("#view")(driver))

        async def give(token: str) -> None:
            await page.do(lambda driver: driver.find_element(By.ID, "token").send_keys(token))
            await page.do(lambda driver: driver.find_element(By.CSS_SELECTOR, "#ask-token button").click())

        await give("wrong")
        await page.until(shown("#token-wrong"))
        await give("open-sesame")
        await page.until(shown("#fleet td"))
        assert not await page.do(lambda driver: shown("#ask-token")(driver))
        address = await page.do(lambda driver: driver.current_url)
        assert "sesame" not in address


async def test_nothing_is_wider_than_a_phone(tmp_path: Path) -> None:
    async with rig(2) as running, browser(tmp_path, width=500) as page:
        await ask(running, [1] * 100)
        await page.do(lambda driver: driver.get(running.ports.admin_url + "/"))
        await page.until(shown("#decisions details"))
        widths = await page.do(
            lambda driver: driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        )
        assert widths[0] <= widths[1]


async def test_the_page_may_load_from_here_alone() -> None:
    async with rig(1) as running:
        for path in ("/", "/page.js", "/page.css"):
            answer = await running.http.get(running.ports.admin_url + path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert "https://" not in answer.text.replace("http://www.w3.org", "")
