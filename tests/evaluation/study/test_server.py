"""The raters' server: a complete study over HTTP, and attempts by hostile or curious raters."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, CookieJar
from aiohttp import test_utils as web_utils

from evaluation.study.config import ServeConfig
from evaluation.study.protocol import Study
from evaluation.study.schedule import make_schedule
from evaluation.study.server import HEADER, HEADERS, MAX_KEYS, RateLimit, Server
from evaluation.study.votes import Votes, open_votes
from shards.base.config import load_config
from shards.base.errors import RequestError
from tests.evaluation.study.studies import make_study

ANSWERS = {"quality": "first", "alignment": "tie"}
Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """A served study and its clients."""

    def __init__(self, study: Study, votes: Votes, server: web_utils.BaseTestServer):
        self.study, self.votes, self.server = study, votes, server
        self.clients: list[web_utils.TestClient[Any, Any]] = []

    @property
    def origin(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def browser(self, token: str | None = None) -> "Browser":
        """Create a client, and enter with a token if one is given."""
        client: web_utils.TestClient[Any, Any] = web_utils.TestClient(self.server, cookie_jar=CookieJar(unsafe=True))
        self.clients.append(client)
        browser = Browser(client, self.origin)
        if token is not None:
            reply = await browser.post("/enter", {"token": token})
            assert reply.status == 200, await reply.text()
            browser.state = await reply.json()
        return browser


class Browser:
    """A client that behaves like the page."""

    def __init__(self, client: web_utils.TestClient[Any, Any], origin: str):
        self.client, self.origin, self.state = client, origin, {}  # type: ignore[var-annotated]

    async def get(self, path: str, **options: Any) -> ClientResponse:
        found: ClientResponse = await self.client.get(path, **options)
        await found.read()
        return found

    async def get_raw(self, path: str) -> tuple[int, bytes]:
        """Send a path unchanged, which a client library would normalise. Return the status and body."""
        cookies = "; ".join(f"{cookie.key}={cookie.value}" for cookie in self.client.session.cookie_jar)
        host = self.origin.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", f"Cookie: {cookies}", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body

    async def post(self, path: str, content: Any, **headers: str) -> ClientResponse:
        own = {"Origin": self.origin, HEADER: self.state.get("proof", "")} | headers
        found: ClientResponse = await self.client.post(path, json=content, headers=own)
        await found.read()
        return found

    async def vote(self, showing: int, answers: dict[str, str] = ANSWERS, **headers: str) -> ClientResponse:
        ballot = {"showing": showing, "answers": answers, "id": f"v{showing}", "seconds": 1.0}
        return await self.post("/vote", ballot, **headers)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("server"))


async def perform(scene: Scene, study: Study, config: dict[str, Any]) -> None:
    """Run a test on a served study, then close its clients."""
    with open_votes(study) as votes:
        async with web_utils.TestServer(Server(study, votes, ServeConfig(**config)).app()) as server:
            stage = Stage(study, votes, server)
            try:
                await scene(stage)
            finally:
                for client in stage.clients:
                    await client.session.close()


@pytest.fixture
def play(prepared: Study, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a test on a served study without votes."""
    (tmp_path / "pictures").symlink_to(prepared.folder / "pictures")
    study = replace(prepared, folder=tmp_path)
    return lambda scene, **config: asyncio.run(perform(scene, study, config))


def on_stage(**config: Any) -> Callable[[Scene], Callable[[Callable[..., None]], None]]:
    """Make a test of a function that acts on a served study."""

    def wrap(scene: Scene) -> Callable[[Callable[..., None]], None]:
        def test(play: Callable[..., None]) -> None:
            play(scene, **config)

        test.__doc__ = scene.__doc__
        return test

    return wrap


@on_stage(rater_rate=1000)
async def test_a_whole_study_by_its_requests(stage: Stage) -> None:
    """Three concurrent raters complete the study, and their answers refer to the displayed sides."""
    schedule = make_schedule(stage.study)

    async def rate(rater: int) -> None:
        browser = await stage.browser(stage.votes.invite(rater))
        state = browser.state
        assert state["total"] == len(schedule[rater]) and [name for name, _ in state["questions"]] == list(ANSWERS)
        while state["next"]:
            # the current showing and the next one, for preloading
            assert len(state["next"]) == min(2, state["total"] - state["done"])
            now = state["next"][0]
            assert now == {"number": state["done"] + 1, "prompt": schedule[rater][state["done"]].item.prompt}
            for side, name in zip(("first", "second"), schedule[rater][state["done"]].pictures, strict=True):
                reply = await browser.get(f"/picture/{now['number']}/{side}")
                assert await reply.read() == (stage.study.folder / "pictures" / name).read_bytes()
            reply = await browser.vote(now["number"])
            state = await reply.json()
            assert state["counted"] == ANSWERS
        assert state["done"] == state["total"]

    await asyncio.gather(*map(rate, range(3)))
    votes = stage.votes.all()
    assert len(votes) == 2 * sum(map(len, schedule))
    assert {(vote.question, vote.answer) for vote in votes} == set(ANSWERS.items())


@on_stage()
async def test_double_clicks_two_tabs_and_reloads(stage: Stage) -> None:
    token = stage.votes.invite(0)
    tabs = [await stage.browser(token) for _ in range(2)]
    replies = await asyncio.gather(*(tab.vote(1) for tab in tabs for _ in range(5)))
    assert {reply.status for reply in replies} == {200}
    reply = await tabs[1].vote(1, {"quality": "second", "alignment": "second"})
    assert (await reply.json())["counted"] == ANSWERS  # the first vote counts, and the tab learns about it
    assert len(stage.votes.all()) == 2
    reloaded = await tabs[0].get("/state")
    assert (await reloaded.json())["done"] == 1


# --- invalid requests ---


@on_stage()
async def test_invalid_votes_are_rejected(stage: Stage) -> None:
    browser = await stage.browser(stage.votes.invite(0))
    total = browser.state["total"]
    good = {"showing": 1, "answers": ANSWERS, "id": "x", "seconds": 1.0}
    for ballot, status in (
        (good | {"showing": 2}, 409),
        (good | {"showing": 0}, 409),
        (good | {"showing": -1}, 409),
        (good | {"showing": total + 1}, 409),
        (good | {"showing": "1"}, 400),
        (good | {"answers": {"quality": "first"}}, 400),
        (good | {"answers": ANSWERS | {"more": "tie"}}, 400),
        (good | {"answers": ANSWERS | {"quality": "A"}}, 400),
        (good | {"id": ""}, 400),
        (good | {"id": "x" * 65}, 400),
        (good | {"seconds": -1.0}, 400),
        (good | {"rater": 1}, 400),
        ([good], 400),
        ("x" * 20_000, 413),
    ):
        reply = await browser.post("/vote", ballot)
        assert reply.status == status, (ballot, await reply.text())
        assert set(await reply.json()) == {"error"}
    for raw in (b"", b"{", b"\xff", b'{"seconds": NaN}'):
        headers = {"Origin": stage.origin, HEADER: browser.state["proof"], "Content-Type": "application/json"}
        async with browser.client.post("/vote", data=raw, headers=headers) as raw_reply:
            assert raw_reply.status == 400
    headers = {"Origin": stage.origin, HEADER: "é\udc80"}
    assert (await browser.post("/vote", good, **headers)).status == 403
    reply = await browser.post("/enter", {"token": "é\udc80"})  # half of a surrogate pair
    assert reply.status == 400
    assert (await browser.post("/enter", {"token": "é"})).status == 403
    assert stage.votes.all() == []


@on_stage()
async def test_votes_from_other_sites_and_raters_are_rejected(stage: Stage) -> None:
    browser, other = [await stage.browser(stage.votes.invite(rater)) for rater in range(2)]
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": stage.origin + ".evil.example"},
        {"Origin": ""},
        {HEADER: ""},
        {HEADER: "0" * 64},
        {HEADER: other.state["proof"]},  # of another invitation that was opened in the same browser
    ):
        reply = await browser.vote(1, **headers)
        assert reply.status == 403
    ballot = {"showing": 1, "answers": ANSWERS, "id": "x", "seconds": 1.0}
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ):  # content types that a form can send
        headers = {"Origin": stage.origin, HEADER: browser.state["proof"], "Content-Type": kind}
        async with browser.client.post("/vote", data=json.dumps(ballot), headers=headers) as sent:
            assert sent.status == 403
    assert (await browser.get("/vote")).status == 405
    assert stage.votes.all() == []
    cookie = next(iter(browser.client.session.cookie_jar))
    assert cookie["httponly"] and cookie["samesite"] == "Strict" and cookie["path"] == "/" and not cookie["secure"]


@on_stage(origin="https://study.example.org")
async def test_behind_https_the_cookie_is_secure_and_the_origin_is_public(stage: Stage) -> None:
    browser = await stage.browser()
    token = stage.votes.invite(0)
    assert (await browser.post("/enter", {"token": token})).status == 403
    reply = await browser.post("/enter", {"token": token}, Origin="https://study.example.org")
    assert reply.status == 200 and "Secure" in reply.headers["Set-Cookie"]


def test_studies_on_different_ports_have_different_cookies(prepared: Study) -> None:
    """Browsers send a host's cookies to all of its ports."""
    other = replace(prepared, secret=bytes(32))
    with open_votes(prepared) as votes:
        first, again, second = (Server(study, votes, ServeConfig()).cookie for study in (prepared, prepared, other))
    assert first == again != second and re.fullmatch(r"study-[0-9a-f]{12}", first)


@on_stage()
async def test_a_body_that_contradicts_its_headers_is_rejected(stage: Stage) -> None:
    browser = await stage.browser(stage.votes.invite(0))
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json", "Origin": browser.origin}
    headers |= {HEADER: browser.state["proof"]}
    reply = await browser.client.post("/vote", data=b"no deflate", headers=headers)
    assert reply.status == 400 and "Reload the page" in (await reply.json())["error"]


def test_an_unreadable_database_is_reported_to_the_operator(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene(stage: Stage) -> None:
        browser = await stage.browser(stage.votes.invite(0))

        def fails(*_: object) -> int:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(Votes, "rater_of", fails)
        reply = await browser.get("/state")
        assert reply.status == 503 and await reply.json() == {"error": "The server is temporarily unavailable."}

    play(scene)
    assert "disk I/O error" in capsys.readouterr().err


@on_stage()
async def test_wrong_replaced_and_missing_tokens(stage: Stage) -> None:
    token = stage.votes.invite(0)
    entered = await stage.browser(token)
    stranger = await stage.browser()
    for tried in ("x", token[:-1], token + "x", token.swapcase()):
        reply = await stranger.post("/enter", {"token": tried})
        assert reply.status == 403
        assert (
            "This link is invalid or has been replaced. Ask the person who invited you" in (await reply.json())["error"]
        )
    for path in ("/state", "/picture/1/first"):
        assert (await stranger.get(path)).status == 403
    stage.votes.invite(0)  # replaces a lost link
    assert (await entered.get("/state")).status == 403
    assert (await entered.vote(1)).status == 403
    assert stage.votes.all() == []


@on_stage()
async def test_a_rater_who_has_finished(stage: Stage) -> None:
    token = stage.votes.invite(0)
    total = len(make_schedule(stage.study)[0])
    for number in range(1, total + 1):
        stage.votes.cast(0, number, ANSWERS, "x", 1.0)
    browser = await stage.browser(token)
    assert browser.state["done"] == total and browser.state["next"] == []
    assert (await browser.get(f"/picture/{total}/first")).status == 404
    assert (await browser.vote(total)).status == 200  # sent again, as after a lost acknowledgement
    assert (await browser.vote(total + 1)).status == 409
    assert len(stage.votes.all()) == 2 * total


@on_stage()
async def test_unknown_paths_and_numbers(stage: Stage) -> None:
    """Path traversal, enumeration and other raters' pictures all get the same reply."""
    browser = await stage.browser(stage.votes.invite(0))
    names = [*stage.study.protocol.items[0].pictures, "../secret", "protocol.json", "votes.sqlite"]
    tried = [f"/picture/{number}/first" for number in (0, 3, 17, -1, "01", "1.0", "%EF%BC%91", "..", "%2e%2e", "1%00")]
    tried += [
        "/picture/1/third",
        "/picture/1/",
        "/picture/1/../../../etc/passwd",
        "/picture/..%2f..%2fsecret/first",
    ]
    tried += [f"/{name}" for name in names] + [f"/pictures/{name}" for name in names]
    tried += ["/study.js/../../server.py", "/..%2f__init__.py", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"]
    tried += ["/static/study.html", "/results.json", "/.git/config", "/votes", "/invite", "/api"]
    bodies = set()
    for path in tried:
        status, body = await browser.get_raw(path)
        assert status == 404, path
        bodies.add(body)
    assert len(bodies) == 1
    for side in ("first", "second"):
        for number in (1, 2):  # the current showing and the next one, for preloading
            assert (await browser.get(f"/picture/{number}/{side}")).status == 200


# --- information that replies could leak ---


@on_stage(rater_rate=1000)
async def test_replies_do_not_reveal_the_kind_of_an_item(stage: Stage) -> None:
    """Replies to repeats and gold items differ only in length and date."""
    schedule = make_schedule(stage.study)[0]
    browser = await stage.browser(stage.votes.invite(0))
    shapes, kinds = set(), set()
    for showing in schedule:
        for side in ("first", "second"):
            reply = await browser.get(f"/picture/{showing.number}/{side}")
            varying = ("Content-Length", "Date")
            shapes.add(tuple((name, value) for name, value in reply.headers.items() if name not in varying))
            kinds.add(showing.kind)
        text = await (await browser.vote(showing.number)).text()
        for word in ("gold", "repeat", "model", "swapped", "item", ".png", *showing.pictures, showing.item.id):
            assert word not in re.sub(r'"prompt": "[^"]*"', "", text)
    assert kinds == {"first", "repeat", "gold"} and len(shapes) == 1
    names = {name.lower() for name, _ in shapes.pop()}
    assert not names & {"etag", "last-modified", "content-disposition", "set-cookie", "x-powered-by"}


@on_stage()
async def test_a_picture_is_addressed_by_its_position_in_the_raters_order(stage: Stage) -> None:
    """So URLs reveal nothing about models, and differ between raters."""
    browsers = [await stage.browser(stage.votes.invite(rater)) for rater in range(3)]
    bodies = [await (await browser.get("/picture/1/first")).read() for browser in browsers]
    names = [showings[0].pictures[0] for showings in make_schedule(stage.study)]
    assert bodies == [(stage.study.folder / "pictures" / name).read_bytes() for name in names]
    assert len(set(names)) == 3


@on_stage()
async def test_every_reply_has_the_security_headers(stage: Stage) -> None:
    browser = await stage.browser(stage.votes.invite(0))
    replies = [await browser.get(path) for path in ("/", "/study.js", "/study.css", "/state", "/picture/1/first", "/x")]
    replies += [await browser.vote(1), await browser.vote(99), await browser.get("/vote")]
    for reply in replies:
        assert {name: reply.headers.get(name) for name in HEADERS} == HEADERS, reply.url
    assert HEADERS["Cache-Control"] == "no-store" and HEADERS["Referrer-Policy"] == "no-referrer"
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
    page = "".join([await reply.text() for reply in replies[:3]])
    assert await (await (await stage.browser()).get("/")).read() == await replies[0].read()  # the same for everyone
    assert not re.search(
        r"https?:|//[a-z]+\.|<script>| style=| on[a-z]+=", page
    )  # no external resources, nothing inline


def test_server_errors_are_reported_to_the_operator(
    play: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The page gets a status that makes it retry."""

    async def scene(stage: Stage) -> None:
        browser = await stage.browser(stage.votes.invite(0))
        (stage.study.folder / "pictures").unlink()
        reply = await browser.get("/picture/1/first")
        assert reply.status == 503 and await reply.json() == {"error": "The server is temporarily unavailable."}
        stage.votes._db.execute("PRAGMA query_only = ON")  # behaves like a full or failing disk
        assert (await browser.vote(1)).status == 503
        stage.votes._db.execute("PRAGMA query_only = OFF")
        assert (await browser.vote(1)).status == 200

    play(scene)
    said = " ".join(capsys.readouterr().err.split())
    assert ".png is missing. Restore it from a backup" in said
    assert "votes.sqlite cannot be written: attempt to write a readonly database. Earlier votes are kept" in said


# --- rate limits ---


def test_rate_limit() -> None:
    now = 0.0
    limit = RateLimit(2.0, 3, clock=lambda: now)
    assert [limit.wait("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limit.wait("b") == 0
    now = 0.5
    assert [limit.wait("a") for _ in range(2)] == [0, 0.5]
    now = 100.0
    assert [limit.wait("a") for _ in range(4)] == [0, 0, 0, 0.5]
    for number in range(3 * MAX_KEYS):
        now += 1.0
        assert limit.wait(str(number)) == 0
    assert len(limit._buckets) <= MAX_KEYS + 1  # full buckets are dropped


@pytest.mark.parametrize(
    ("config", "path", "count"),
    [
        ({"rater_rate": 0.001}, "/state", 60),
        ({"address_rate": 0.001}, "/", 1000),
        ({"entry_rate": 0.001}, "/enter", 60),
    ],
)
def test_too_many_requests_are_rejected(
    play: Callable[..., None], config: dict[str, float], path: str, count: int
) -> None:
    async def scene(stage: Stage) -> None:
        browser = await stage.browser(stage.votes.invite(0))
        found = []
        for _ in range(count + 1):
            reply = await (browser.post(path, {"token": "guess"}) if path == "/enter" else browser.get(path))
            found.append(reply.status)
        assert 429 in found[-2:] and 429 not in found[: count - 2]
        assert int(reply.headers["Retry-After"]) > 1

    play(scene, **config)


@on_stage(proxies=1, entry_rate=0.001)
async def test_behind_a_proxy_the_address_is_taken_from_the_proxys_header(stage: Stage) -> None:
    """Entries of the header that the client wrote itself are further left and are ignored."""
    browser = await stage.browser()

    async def guess(forwarded: str) -> int:
        headers = {"Origin": stage.origin, "X-Forwarded-For": forwarded}
        async with browser.client.post("/enter", json={"token": "guess"}, headers=headers) as reply:
            return reply.status

    assert [await guess(f"9.9.9.{n}, 1.1.1.1") for n in range(61)].count(429) == 1
    assert await guess("1.1.1.1, 2.2.2.2") == 403
    for number in range(2):  # a proxy may add a header of its own instead of appending to the client's
        headers = [("Origin", stage.origin), ("X-Forwarded-For", f"9.9.9.{number}"), ("X-Forwarded-For", "1.1.1.1")]
        async with browser.client.post("/enter", json={"token": "guess"}, headers=headers) as reply:
            assert reply.status == 429


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("https://Study.Example.ORG", "https://study.example.org"),
        ("https://study.example.org:443", "https://study.example.org"),
        ("http://study.example.org:80", "http://study.example.org"),
        ("http://study.example.org:8080", "http://study.example.org:8080"),
        ("https://study.example.org:80", "https://study.example.org:80"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("http://[::1]:8770", "http://[::1]:8770"),
    ],
)
def test_an_origin_is_normalised_to_what_browsers_send(written: str, sent: str) -> None:
    assert ServeConfig(origin=written).origin == sent


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("https://study.example.org:99999", "invalid port number"),
        ("https://study.example.org/", "should match pattern"),
        ("https://study.example.org?x", "should match pattern"),
        ("study.example.org", "should match pattern"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"`origin` = '{re.escape(origin)}': .*{message}[^\n]*$"):
        load_config(ServeConfig, None, ["--origin", origin], "test")
