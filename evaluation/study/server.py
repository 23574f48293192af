"""The server that shows raters their images and stores their votes, in a single process.

    GET  /                         the page, the same for everyone, with its script and style
    POST /enter    {token}         exchange an invitation token for a cookie, once per browser
    GET  /state                    the next trial
    GET  /picture/NUMBER/SIDE      an image of the current trial or the one after it
    POST /vote     {showing, …}    returns the answers that count, and the state

Raters see only positions and prompts. An item's kind, the model behind an image, and file names never leave the
process. Replies look the same for every kind of item, and none may be cached.
"""

import hashlib
import hmac
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.study.config import ServeConfig
from evaluation.study.protocol import Study
from evaluation.study.schedule import make_schedule
from evaluation.study.votes import Votes, as_bytes
from shards.base.errors import RequestError, WorkError, say

HEADER = "X-Study"
MAX_BODY_BYTES = 16_384
MAX_KEYS = 10_000
"""Number of keys in a `RateLimit` above which full buckets are removed from memory."""
YEAR_SECONDS = 365 * 24 * 3600
PAGE = Path(__file__).with_name("page")
FILES = {
    "/": ("study.html", "text/html"),
    "/study.css": ("study.css", "text/css"),
    "/study.js": ("study.js", "text/javascript"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src blob:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "Server": "study",
    "X-Content-Type-Options": "nosniff",
    "X-Robots-Tag": "noindex",
}


class EntryRequest(BaseModel):
    """Body of a request to /enter."""

    model_config = ConfigDict(extra="forbid", strict=True)
    token: str = Field(min_length=1, max_length=100)


class VoteRequest(BaseModel):
    """Body of a request to /vote."""

    model_config = ConfigDict(extra="forbid", strict=True)
    showing: int
    answers: dict[str, Literal["first", "second", "tie"]]
    id: str = Field(min_length=1, max_length=64)
    seconds: float = Field(ge=0, le=1e6, allow_inf_nan=False)


class Refusal(Exception):
    """Refusal of a request, with a message for the rater."""

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None):
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


INVALID_LINK = "This link is invalid or has been replaced. Ask the person who invited you for a new one."
NOT_FOUND = "This page does not exist. Open your invitation link again."
OTHER_RATER = "A different invitation has been opened in this browser. Open your link again. Your votes are saved."


class RateLimit:
    """A token bucket per key, which refills at `per_second` up to `burst` tokens."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.per_second, self.burst = per_second, burst
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._max_keys = MAX_KEYS

    def wait(self, key: str) -> float:
        """Take a token and return 0, or return the number of seconds until one is available."""
        now = self._clock()
        tokens = self._refilled(key, now)
        granted = tokens >= 1
        self._buckets[key] = (tokens - granted, now)
        if len(self._buckets) > self._max_keys:  # a full bucket behaves like a missing one
            self._buckets = {key: self._buckets[key] for key in self._buckets if self._refilled(key, now) < self.burst}
            self._max_keys = max(MAX_KEYS, 2 * len(self._buckets))
        return 0.0 if granted else (1 - tokens) / self.per_second

    def _refilled(self, key: str, now: float) -> float:
        """Return the tokens in a key's bucket at time `now`."""
        tokens, then = self._buckets.get(key, (self.burst, now))
        return min(self.burst, tokens + (now - then) * self.per_second)


@dataclass
class Server:
    """Request handlers for one study."""

    study: Study
    votes: Votes
    config: ServeConfig

    def __post_init__(self) -> None:
        self.schedule = make_schedule(self.study)
        # browsers share cookies between all ports of a host, and another port may serve a different study
        self.cookie = f"study-{hashlib.sha256(self.study.secret).hexdigest()[:12]}"
        self.by_rater = RateLimit(self.config.rater_rate, 60)
        self.by_address = RateLimit(self.config.address_rate, 1000)
        self.entries = RateLimit(self.config.entry_rate, 60)
        self.files = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def app(self) -> web.Application:
        """Build the aiohttp application: routes, error handling and headers."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._handle_errors])
        for path in self.files:
            app.router.add_get(path, self.page_file, allow_head=False)
        app.router.add_get("/state", self.state, allow_head=False)
        app.router.add_get("/picture/{number}/{side}", self.picture, allow_head=False)
        app.router.add_post("/enter", self.enter)
        app.router.add_post("/vote", self.vote)
        app.on_response_prepare.append(self._with_headers)
        return app

    async def page_file(self, request: web.Request) -> web.Response:
        """Return the page, its script or its style, which contain nothing about the study."""
        body, kind = self.files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def enter(self, request: web.Request) -> web.Response:
        """Exchange an invitation token for a cookie.

        The token is in the link's fragment (after the #), which browsers do not send, so the page posts it here.
        """
        if wait := self.entries.wait(self._address(request)):
            raise _too_many(wait)
        token = (await self._body(request, EntryRequest)).token
        rater = self.votes.rater_of(token)
        if rater is None:
            raise Refusal(403, INVALID_LINK)
        response = self._state(rater, token)
        secure = self._origin(request).startswith("https:")
        response.set_cookie(self.cookie, token, max_age=YEAR_SECONDS, httponly=True, samesite="Strict", secure=secure)
        return response

    async def state(self, request: web.Request) -> web.Response:
        """Return the rater's progress and up to two upcoming trials."""
        return self._state(*self._rater(request))

    async def picture(self, request: web.Request) -> web.Response:
        """Return an image of the current or the next trial, addressed only by its position."""
        rater, _ = self._rater(request)
        number, side = request.match_info["number"], request.match_info["side"]
        done = self.votes.num_done(rater)
        available = {str(showing.number): showing for showing in self.schedule[rater][done : done + 2]}
        if number not in available or side not in ("first", "second"):
            raise Refusal(404, NOT_FOUND)
        name = available[number].pictures[side == "second"]
        return web.Response(body=self.study.picture(name), content_type="image/png")

    async def vote(self, request: web.Request) -> web.Response:
        """Store the answers for one trial. A second vote on the same trial changes nothing and gets the same reply."""
        rater, token = self._rater(request)
        if not hmac.compare_digest(as_bytes(request.headers.get(HEADER, "")), self._proof(token).encode()):
            raise Refusal(403, OTHER_RATER)
        ballot = await self._body(request, VoteRequest)
        if ballot.answers.keys() != self.study.protocol.config.questions.keys():
            raise Refusal(400, "Every question needs an answer. Reload the page.")
        if not 1 <= ballot.showing <= min(self.votes.num_done(rater) + 1, len(self.schedule[rater])):
            raise Refusal(409, "These are not the next pictures to vote on. Reload the page.")
        kept = self.votes.cast(rater, ballot.showing, ballot.answers, ballot.id, ballot.seconds)
        return self._state(rater, token, counted=kept)

    def _state(self, rater: int, token: str, **more: Any) -> web.Response:
        """Build the reply that describes a rater's progress."""
        showings, done = self.schedule[rater], self.votes.num_done(rater)
        state = {
            "name": self.study.protocol.config.name,
            "questions": list(self.study.protocol.config.questions.items()),
            "total": len(showings),
            "done": done,
            "next": [{"number": each.number, "prompt": each.item.prompt} for each in showings[done : done + 2]],
            "proof": self._proof(token),
            **more,
        }
        return web.json_response(state)

    def _proof(self, token: str) -> str:
        """Derive from a token a value that other sites cannot know. It differs between raters who share a browser."""
        return hmac.digest(self.study.secret, b"proof" + as_bytes(token), "sha256").hex()

    def _rater(self, request: web.Request) -> tuple[int, str]:
        """Return the rater and the token that a request's cookie identifies.

        Raises:
            Refusal: the token is invalid or has been replaced, or the rater sends too many requests.
        """
        token = request.cookies.get(self.cookie, "")
        rater = self.votes.rater_of(token)
        if rater is None:
            raise Refusal(403, INVALID_LINK)
        if wait := self.by_rater.wait(str(rater)):
            raise _too_many(wait)
        return rater, token

    def _origin(self, request: web.Request) -> str:
        return self.config.origin or f"{request.scheme}://{request.host}"

    def _address(self, request: web.Request) -> str:
        """Return the client's IP address. Only the last `proxies` entries of X-Forwarded-For are trusted."""
        # a proxy may add a line of its own instead of appending to the client's
        hops = [hop.strip() for hop in ",".join(request.headers.getall("X-Forwarded-For", [])).split(",")]
        trusted = hops[-self.config.proxies :] if self.config.proxies else []
        return trusted[0] if len(trusted) == self.config.proxies and trusted else request.remote or ""

    async def _body(self, request: web.Request, model: type[Any]) -> Any:
        """Parse the JSON body of a request from this origin.

        Raises:
            Refusal: the request comes from a different origin, or its body is invalid.
        """
        if request.headers.get("Origin") != self._origin(request) or request.content_type != "application/json":
            raise Refusal(403, "This request came from a different site. Open your link again.")
        try:
            return model.model_validate_json(await request.read())
        except (ValidationError, RequestPayloadError):  # RequestPayloadError: the body does not match its headers
            raise Refusal(400, "The request is invalid. Reload the page.") from None

    @web.middleware
    async def _handle_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if wait := self.by_address.wait(self._address(request)):
                raise _too_many(wait)
            return await handler(request)
        except Refusal as refusal:
            return web.json_response({"error": refusal.text}, status=refusal.status, headers=refusal.headers)
        except (WorkError, sqlite3.Error) as error:
            # for example, a full disk or a missing image: the operator sees the error, and the page retries
            say(error)
            return web.json_response({"error": "The server is temporarily unavailable."}, status=503)
        except web.HTTPException as error:  # unknown path, unsupported method, or a body that is too long
            return web.json_response({"error": NOT_FOUND}, status=error.status)

    async def _with_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)


def _too_many(wait: float) -> Refusal:
    return Refusal(429, "Too many requests. Wait a moment.", {"Retry-After": str(math.ceil(wait))})


def serve(study: Study, votes: Votes, config: ServeConfig) -> None:
    """Serve a study until Ctrl-C or SIGTERM.

    Raises:
        RequestError: the server cannot listen on the address.
    """
    server = Server(study, votes, config)
    address = f"{config.host}:{config.port}"
    try:
        web.run_app(
            server.app(),
            host=config.host,
            port=config.port,
            access_log=None,
            shutdown_timeout=2.0,
            print=lambda _: print(
                f"Serving {study.folder} at http://{address}. Stop with Ctrl-C; votes are kept.", flush=True
            ),
        )
    except OSError as error:
        raise RequestError(
            f"The server cannot listen on {address}: {error.strerror or error}. Choose a different port with "
            f"--serve.port."
        ) from error
