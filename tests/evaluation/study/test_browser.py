"""The raters' page in Chromium, with the real server: `make test-browser`."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evaluation.study.analysis import analyse
from evaluation.study.protocol import Study
from evaluation.study.schedule import make_schedule
from evaluation.study.votes import Vote, open_votes
from tests.evaluation.study.browser import Browser, Page, browsing, chromium
from tests.evaluation.study.studies import make_study
from tests.ranks import environment, free_port

pytestmark = [pytest.mark.slow, pytest.mark.browser]
READY = "!document.getElementById('ballot').hidden && !document.querySelector('.waiting')"
DONE = "document.getElementById('message').textContent.startsWith('That was the last pair')"
COUNT = "document.getElementById('count').textContent"


@pytest.fixture(scope="module", autouse=True)
def _needs_chromium() -> None:
    if chromium() is None:
        pytest.fail("These tests need Chromium: apt-get install chromium")


class Serving:
    """The server's command in a process."""

    def __init__(self, study: Study, *options: str):
        self.study, self.options, self.port = study, options, free_port()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        words = ["serve", "--output", str(self.study.folder), "--serve.port", str(self.port), *self.options]
        command = [sys.executable, "-m", "evaluation.study", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.match(r"Raters invited: \d+ of \d+\. To invite more, run `python -m evaluation\.study invite", line)
        assert f"at http://127.0.0.1:{self.port}. Stop with Ctrl-C" in self.process.stdout.readline()

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def links(self, count: int) -> list[str]:
        with open_votes(self.study) as votes:
            return [f"http://127.0.0.1:{self.port}/#{votes.invite(rater)}" for rater in range(count)]

    def votes(self) -> list[Vote]:
        with open_votes(self.study) as votes:
            return votes.all()


@contextmanager
def served(folder: Path, **protocol: Any) -> Iterator[Serving]:
    serving = Serving(make_study(folder, **protocol), "--serve.rater_rate", "200", "--serve.entry_rate", "100")
    serving.start()
    try:
        yield serving
    finally:
        serving.kill()


async def begin(browser: Browser, link: str, width: int = 1280, height: int = 800) -> Page:
    page = await browser.page()
    await page.size(width, height)
    await page.go(link)
    await page.wait("!document.getElementById('intro').hidden")
    await page.click("#begin")
    await page.wait(READY)
    return page


def answered(votes: list[Vote]) -> dict[tuple[int, int, str], str]:
    """Return the votes by rater, showing and question, checking that they are unique."""
    found = {(vote.rater, vote.showing, vote.question): vote.answer for vote in votes}
    assert len(found) == len(votes)
    return found


async def by_keys(page: Page, keys: tuple[str, str], after: str) -> None:
    for key in (*keys, "Enter"):
        await page.press(key)
    await page.wait(f"{COUNT} === '{after}' && ({READY} || {DONE})")


def test_a_whole_study_of_three_raters(tmp_path: Path) -> None:
    """One uses the keyboard, one double-clicks, and one reloads the page on a phone. All votes are stored correctly."""

    async def main(serving: Serving) -> dict[tuple[int, int, str], str]:
        totals = [len(showings) for showings in make_schedule(serving.study)]
        said: dict[tuple[int, int, str], str] = {}
        pressed = {"1": "first", "2": "second", "0": "tie"} | {
            "ArrowLeft": "first",
            "ArrowRight": "second",
            "ArrowDown": "tie",
        }

        async def keyboard(page: Page) -> None:
            keys = list(pressed)
            for number in range(1, totals[0] + 1):
                two = keys[number % 6], keys[(number + 2) % 6]
                await by_keys(page, two, f"{number} of {totals[0]}")
                said.update(
                    {
                        (0, number, q): pressed[key]
                        for q, key in zip(serving.study.protocol.config.questions, two, strict=True)
                    }
                )

        async def mouse(page: Page) -> None:
            for number in range(1, totals[1] + 1):
                for question, answer in (("alignment", "second"), ("quality", "tie")):  # in the other order
                    await page.click(f"input[name={question}][value={answer}]")
                    said[1, number, question] = answer
                await page.click("#send", times=2)
                await page.wait(f"{COUNT} === '{number} of {totals[1]}' && ({READY} || {DONE})")

        async def phone(page: Page) -> None:
            for number in range(1, totals[2] + 1):
                assert await page.run("document.getElementById('send').disabled")
                for question in ("quality", "alignment"):
                    await page.click(f"input[name={question}][value=first]")
                    said[2, number, question] = "first"
                await page.click("#send")
                await page.wait(f"{COUNT} === '{number} of {totals[2]}' && ({READY} || {DONE})")
                if number % 4 == 1 and number < totals[2]:
                    await page.send("Page.reload")
                    await asyncio.sleep(0.2)
                    await page.wait(READY)  # continues without the introduction
                    assert await page.run(COUNT) == f"{number} of {totals[2]}"

        async with browsing() as browser:
            links = serving.links(3)
            pages = [await begin(browser, link, *size) for link, size in zip(links, SIZES, strict=True)]
            for page in pages:
                assert await page.run("location.hash + document.cookie + document.referrer") == ""
            await asyncio.gather(keyboard(pages[0]), mouse(pages[1]), phone(pages[2]))
            for page in pages:
                assert await page.run(DONE)
                await page.send("Page.reload")
                await page.wait(DONE)
            assert browser.messages == []
        return said

    with served(tmp_path, gold={"share": 0.25, "exclude_below": None}) as serving:
        said = asyncio.run(main(serving))
        assert answered(serving.votes()) == said
        assert not analyse(serving.study, serving.votes())["partial"]


SIZES = ((1280, 800), (1024, 700), (390, 844))


def act(folder: Path, scene: Callable[[Page, Serving], Awaitable[None]], *size: int) -> list[Vote]:
    """Run a scene on the page of the only invited rater, who has begun, and return the votes."""

    async def main(serving: Serving) -> None:
        (link,) = serving.links(1)
        async with browsing() as browser:
            await scene(await begin(browser, link, *size), serving)

    with served(folder) as serving:
        asyncio.run(main(serving))
        return serving.votes()


def address_of(serving: Serving) -> str:
    """Return the page's address without an invitation."""
    return f"http://127.0.0.1:{serving.port}/"


def test_two_tabs_of_one_rater(tmp_path: Path) -> None:
    """The first vote counts, and the other tab continues from there."""

    async def scene(first: Page, serving: Serving) -> None:
        second = await first.browser.page(beside=first)
        await second.go(address_of(serving))  # both tabs share the cookie
        await second.wait("!document.getElementById('intro').hidden")
        await second.click("#begin")
        await second.wait(READY)
        total = len(make_schedule(serving.study)[0])
        await by_keys(first, ("1", "1"), f"1 of {total}")
        await by_keys(first, ("1", "1"), f"2 of {total}")
        await by_keys(second, ("2", "2"), f"2 of {total}")  # it still showed the first pair
        await by_keys(second, ("0", "0"), f"3 of {total}")

    assert [vote.answer for vote in act(tmp_path, scene)] == ["first", "first", "first", "first", "tie", "tie"]


def test_a_vote_survives_a_lost_network_and_a_killed_server(tmp_path: Path) -> None:
    """The vote is kept, even if the page is closed, and arrives once."""

    async def scene(page: Page, serving: Serving) -> None:
        total = len(make_schedule(serving.study)[0])
        await page.network(False)
        for key in ("1", "2", "Enter", "Enter"):
            await page.press(key)
        await page.wait("document.getElementById('message').textContent.startsWith('Waiting for the network')")
        assert serving.votes() == []
        await page.network(True)
        await page.wait(f"{COUNT} === '1 of {total}' && {READY}")
        assert await page.run("document.getElementById('message').textContent") == ""
        # again, closing the page before the server is restarted
        serving.kill()
        for key in ("0", "1", "Enter"):
            await page.press(key)
        await page.wait("document.getElementById('message').textContent.startsWith('Waiting')")
        again = await page.browser.page(beside=page)
        await page.send("Page.close")
        serving.start()
        await again.go(address_of(serving))
        await again.wait(f"{COUNT} === '2 of {total}' && {READY}")

    assert [vote.answer for vote in act(tmp_path, scene)] == ["first", "second", "tie", "first"]


def test_pictures_appear_together(tmp_path: Path) -> None:
    """Raters cannot see which image loads slowly."""

    async def scene(page: Page, serving: Serving) -> None:
        await page.send("Fetch.enable", patterns=[{"urlPattern": "*/second"}])
        total = len(make_schedule(serving.study)[0])
        await by_keys(page, ("1", "1"), f"1 of {total}")  # it was loaded before
        for key in ("1", "1", "Enter"):
            await page.press(key)
        await page.wait(f"{COUNT} === '2 of {total}'")
        await asyncio.sleep(1.0)
        hidden = "getComputedStyle(document.getElementById('first')).visibility"
        assert await page.run(hidden) == "hidden"
        await page.send("Fetch.disable")
        await page.wait(READY)
        assert await page.run(hidden) == "visible"

    act(tmp_path, scene)


def test_invalid_and_foreign_links(tmp_path: Path) -> None:
    async def main(serving: Serving) -> None:
        links = serving.links(2)
        async with browsing() as browser:
            stranger = await browser.page()
            for tail in ("#nonsense", ""):
                await stranger.go("about:blank")
                await stranger.go(links[0].partition("#")[0] + tail)
                await stranger.wait("document.body.innerText.includes('This link is invalid or has been replaced')")
            page = await begin(browser, links[0])
            other = await browser.page(beside=page)
            await other.go(links[1])  # a second rater in the same browser
            await other.wait("!document.getElementById('intro').hidden")
            for key in ("1", "1", "Enter"):
                await page.press(key)
            await page.wait("document.body.innerText.includes('A different invitation has been opened in this')")
            assert serving.votes() == []
            back = await browser.page(beside=page)
            await back.go(links[0])  # the unsent vote is sent now
            await back.wait(f"{COUNT}.startsWith('1 of ')")

    with served(tmp_path) as serving:
        asyncio.run(main(serving))
        assert [(vote.rater, vote.answer) for vote in serving.votes()] == [(0, "first"), (0, "first")]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (360, 640), (844, 390)])
def test_everything_is_visible_without_scrolling_and_has_a_name(tmp_path: Path, width: int, height: int) -> None:
    """A long prompt scrolls instead of covering a picture, which could favour one side."""

    async def scene(page: Page, serving: Serving) -> None:
        root = "document.documentElement"
        assert await page.run(f"{root}.scrollWidth <= innerWidth && {root}.scrollHeight <= innerHeight")
        boxes = await page.run(
            "[...document.querySelectorAll('img, label, button, q')].filter(e => e.offsetParent)"
            ".map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
        )
        assert len(boxes) == 10  # a prompt, two images, six answers, a button
        assert all(0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height for x0, y0, x1, y1 in boxes)
        tall = await page.run("[...document.querySelectorAll('label, #send')].map(e => e.offsetHeight)")
        assert min(tall) >= 44  # large enough for a finger
        assert len([box for box in boxes if box[3] - box[1] > 100]) == 2  # the pictures
        await page.press("1")
        focus = "document.activeElement.name + document.activeElement.type"
        assert await page.run(focus) == "alignmentradio"  # the focus moves to the next question
        tree = await page.send("Accessibility.getFullAXTree")
        nodes = [node for node in tree["nodes"] if not node["ignored"] and node.get("name")]
        named = {(node["role"]["value"], node["name"]["value"]) for node in nodes}
        assert {("radio", "Picture 1"), ("radio", "No difference"), ("radio", "Picture 2")} <= named
        assert {("group", text) for text in serving.study.protocol.config.questions.values()} <= named
        assert {("image", "Picture 1"), ("image", "Picture 2"), ("button", "Next")} <= named
        assert any(role.lower().startswith("progress") and " of " in name for role, name in named)
        await page.picture(tmp_path / f"{width}.png")
        await page.run("document.querySelector('.prompt q').textContent = 'a very long prompt '.repeat(16)")
        boxes = await page.run(
            "[...document.querySelectorAll('figure, #answers')].map(e => e.getBoundingClientRect())"
            ".map(b => [b.left, b.top, b.right, b.bottom])"
        )
        assert len(boxes) == 3
        for number, (x0, y0, x1, y1) in enumerate(boxes):
            assert x1 - x0 > 100 and y1 - y0 > 80
            for left, top, right, bottom in boxes[number + 1 :]:
                assert x1 <= left or right <= x0 or y1 <= top or bottom <= y0
        assert page.browser.messages == []

    act(tmp_path, scene, width, height)
