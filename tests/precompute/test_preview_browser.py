"""The preview of a root in Chromium: `make test-browser`."""

import asyncio
from pathlib import Path

import pytest

from precompute.preview import run
from tests.evaluation.study.browser import browsing

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_every_image(latents: Path, tmp_path: Path, width: int) -> None:
    run([str(latents), "--output", str(tmp_path / "page.html")])

    async def main() -> None:
        async with browsing() as browser:
            page = await browser.page()
            await page.size(width, 844)
            await page.go((tmp_path / "page.html").as_uri())
            await page.wait("document.readyState === 'complete' && !!document.querySelector('figure')")
            assert await page.run("[...document.images].every(image => image.complete && image.naturalWidth)")
            assert await page.run("document.images.length") == await page.run(
                "document.querySelectorAll('figcaption').length"
            )
            assert await page.run("document.documentElement.scrollWidth") <= width
            await page.picture(tmp_path / f"{width}.png")
            assert browser.messages == []

    asyncio.run(main())
