"""The report in Chromium, on a desktop and on a phone: `make test-browser`."""

import asyncio
from pathlib import Path

import pytest

from tests.evaluation.report.pages import add_evaluation, make_run, report
from tests.evaluation.study.browser import browsing

pytestmark = [pytest.mark.slow, pytest.mark.browser]
NARROW = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.frame') && !e.closest('svg'))"
FOCUSED = "document.activeElement.tagName + ' ' + (document.activeElement.getAttribute('aria-label') ?? '')"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_page_works_without_a_mouse(tmp_path: Path, width: int, height: int) -> None:
    """Only frames are wider than the screen, Tab reaches each of them, and charts and images have names."""
    first = make_run(tmp_path / "phase1")
    second = make_run(tmp_path / "phase2", steps=20, init_from=str(first))
    for run, step in ((first, 10), (first, 40), (second, 20)):
        add_evaluation(run, step, "id1", 5 - step / 10)
    path = tmp_path / "page.html"
    report(first, second, "--output", path)

    async def main() -> None:
        async with browsing() as browser:
            page = await browser.page()
            await page.size(width, height)
            await page.go(path.as_uri())
            await page.wait("document.readyState === 'complete' && !!document.querySelector('main')")
            assert await page.run("document.documentElement.scrollWidth") <= width
            wide = f"{NARROW}.filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
            assert await page.run(wide) == []
            assert await page.run("[...document.images].every(image => image.complete && image.naturalWidth)")
            await page.press("Tab")
            assert (await page.run("document.activeElement.textContent")) == "Skip to the content"
            frames = set(await page.run("[...document.querySelectorAll('.frame')].map(e => e.ariaLabel)"))
            reached = set()
            for _ in range(await page.run("document.querySelectorAll('a, summary, .frame').length")):
                await page.press("Tab")
                reached.add((await page.run(FOCUSED)).partition(" ")[2])
            closed = {name for name in frames if name.endswith(": values")}
            assert frames - closed <= reached and closed
            tree = await page.send("Accessibility.getFullAXTree")
            found = [
                (node["role"]["value"], node.get("name", {}).get("value", ""))
                for node in tree["nodes"]
                if not node["ignored"]
            ]
            images = [name for role, name in found if role in ("image", "img", "graphics-document")]
            assert images and all(images) and any(name.startswith("Loss over steps") for name in images)
            await page.picture(tmp_path / f"{width}.png")
            assert browser.messages == []

    asyncio.run(main())
