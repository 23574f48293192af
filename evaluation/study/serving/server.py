"""One process that shows raters their pictures and takes their votes.

    GET  /                         the page, the same for all; its script and style
    POST /enter    {token}         an invitation's token, once per browser => a cookie
    GET  /state                    which showing is next
    GET  /picture/NUMBER/SIDE      of the current showing or the one after it
    POST /vote     {showing, …}    => the answers that count, and the state

A rater learns positions and prompts. What an item is, which model made a picture, what a file is called: none of it
leaves the process. Every reply is shaped alike, and none may be stored.
"""

import hashlib
import hmac
import math
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.study.protocol import Study
from evaluation.study.schedule import Draws, Showing, make_schedule
from evaluation.study.serving.config import ServeConfig
from evaluation.study.serving.limits import Limit
from evaluation.study.votes import Votes, as_bytes
from shards.base.errors import RequestError, WorkError, say

HEADER = "X-Study"
MOST_BYTES = 16_384
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


class Entry(BaseModel):
    """What /enter takes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    token: str = Field(min_length=1, max_length=100)


class Ballot(BaseModel):
    """What /vote takes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    showing: int
    answers: dict[str, Literal["first", "second", "tie"]]
    id: str = Field(min_length=1, max_length=64)
    seconds: float = Field(ge=0, le=1e6, allow_inf_nan=False)


class Refusal(Exception):
    """An answer of one paragraph, for the rater."""

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None):
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


NOT_YOURS = "This link is not valid (any more). Ask whoever invited you for a new one."
NOTHING = "There is nothing here. Open the link of your invitation again."
ELSEWHERE = "Another invitation was opened in this browser since. Open your own link again: your votes are kept."


@dataclass
class Server:
    """A study while it is served."""

    study: Study
    votes: Votes
    config: ServeConfig

    def __post_init__(self) -> None:
        protocol = self.study.protocol
        self.schedule = make_schedule(protocol, Draws(self.study.secret, protocol.seed))
        # a browser has one for all ports of a host, on each of which there may be a study
        self.cookie = f"study-{hashlib.sha256(self.study.secret).hexdigest()[:12]}"
        self.by_rater = Limit(self.config.rater_rate, 60)
        self.by_address = Limit(self.config.address_rate, 1000)
        self.entries = Limit(self.config.entry_rate, 60)
        self.files = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guarded])
        for path in self.files:
            app.router.add_get(path, self.page_file, allow_head=False)
        app.router.add_get("/state", self.state, allow_head=False)
        app.router.add_get("/picture/{number}/{side}", self.picture, allow_head=False)
        app.router.add_post("/enter", self.enter)
        app.router.add_post("/vote", self.vote)
        app.on_response_prepare.append(self._with_headers)
        return app

    async def page_file(self, request: web.Request) -> web.Response:
        """The page itself knows nothing of the study."""
        body, kind = self.files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def enter(self, request: web.Request) -> web.Response:
        """A token, which the page took from behind the link's #: that part of an address is sent to nobody."""
        if wait := self.entries.wait(self._address(request)):
            raise _too_many(wait)
        token = (await self._body(request, Entry)).token
        rater = self.votes.rater_of(token)
        if rater is None:
            raise Refusal(403, NOT_YOURS)
        response = self._state(rater, token)
        is_safe = self._origin(request).startswith("https:")
        response.set_cookie(
            self.cookie, token, max_age=YEAR_SECONDS, httponly=True, samesite="Strict", secure=is_safe, path="/"
        )
        return response

    async def state(self, request: web.Request) -> web.Response:
        return self._state(*self._rater(request))

    async def picture(self, request: web.Request) -> web.Response:
        """By the place where it is shown, and by nothing else."""
        rater, _ = self._rater(request)
        number, side = request.match_info["number"], request.match_info["side"]
        done = self.votes.num_done(rater)
        near = {str(showing.number): showing for showing in self.schedule[rater][done : done + 2]}
        if number not in near or side not in ("first", "second"):
            raise Refusal(404, NOTHING)
        name = near[number].pictures[side == "second"]
        return web.Response(body=self.study.picture(name), content_type="image/png")

    async def vote(self, request: web.Request) -> web.Response:
        """All answers to a showing at once. To vote again changes nothing, and is answered alike."""
        rater, token = self._rater(request)
        if not hmac.compare_digest(as_bytes(request.headers.get(HEADER, "")), self._proof(token).encode()):
            raise Refusal(403, ELSEWHERE)
        ballot = await self._body(request, Ballot)
        if ballot.answers.keys() != self.study.protocol.questions.keys():
            raise Refusal(400, "Every question needs an answer. Load the page again.")
        if not 1 <= ballot.showing <= min(self.votes.num_done(rater) + 1, len(self.schedule[rater])):
            raise Refusal(409, "These pictures are not the ones to be voted on next. Load the page again.")
        kept = self.votes.cast(rater, ballot.showing, ballot.answers, ballot.id, ballot.seconds)
        return self._state(rater, token, counted=kept)

    def _state(self, rater: int, token: str, **more: Any) -> web.Response:
        showings, done = self.schedule[rater], self.votes.num_done(rater)
        protocol = self.study.protocol
        state = {
            "name": protocol.name,
            "questions": list(protocol.questions.items()),
            "total": len(showings),
            "done": done,
            "next": [self._shown(showing) for showing in showings[done : done + 2]],
            "proof": self._proof(token),
            **more,
        }
        return web.json_response(state)

    def _shown(self, showing: Showing) -> dict[str, Any]:
        return {"number": showing.number, "prompt": showing.item.prompt}

    def _proof(self, token: str) -> str:
        """What a page of another site cannot know, and what tells two raters in one browser apart."""
        return hmac.digest(self.study.secret, b"proof" + as_bytes(token), "sha256").hex()

    def _rater(self, request: web.Request) -> tuple[int, str]:
        token = request.cookies.get(self.cookie, "")
        rater = self.votes.rater_of(token)
        if rater is None:
            raise Refusal(403, NOT_YOURS)
        if wait := self.by_rater.wait(str(rater)):
            raise _too_many(wait)
        return rater, token

    def _origin(self, request: web.Request) -> str:
        return self.config.origin or f"{request.scheme}://{request.host}"

    def _address(self, request: web.Request) -> str:
        hops = [hop.strip() for hop in request.headers.get("X-Forwarded-For", "").split(",")]
        behind = hops[-self.config.proxies :] if self.config.proxies else []
        return behind[0] if len(behind) == self.config.proxies and behind else request.remote or ""

    async def _body(self, request: web.Request, model: type[Any]) -> Any:
        """What a page of this origin sent, as JSON.

        Raises:
            Refusal: it is another's, or something else.
        """
        if request.headers.get("Origin") != self._origin(request) or request.content_type != "application/json":
            raise Refusal(403, "This came from another page than this study's. Open your own link again.")
        try:
            return model.model_validate_json(await request.read())
        except (ValidationError, RequestPayloadError):  # the latter: not as its headers say
            raise Refusal(400, "This is not what the page sends. Load it again.") from None

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if wait := self.by_address.wait(self._address(request)):
                raise _too_many(wait)
            return await handler(request)
        except Refusal as refusal:
            return web.json_response({"error": refusal.text}, status=refusal.status, headers=refusal.headers)
        except (WorkError, sqlite3.Error) as error:
            # a full disk, a picture that is gone: for whoever serves; the page asks again
            say(error)
            return web.json_response({"error": "The server cannot go on just now."}, status=503)
        except web.HTTPException as error:  # no such path, a method that it lacks, a body too long
            return web.json_response({"error": NOTHING}, status=error.status)

    async def _with_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)


def _too_many(wait: float) -> Refusal:
    return Refusal(429, "Too many requests: wait a moment.", {"Retry-After": str(math.ceil(wait))})


def serve(study: Study, votes: Votes, config: ServeConfig) -> None:
    """Serve until a signal.

    Raises:
        RequestError: the address cannot be listened at.
    """
    server = Server(study, votes, config)
    said = f"{study.folder}: http://{config.host}:{config.port} (Ctrl-C ends it; what was voted is kept)"
    try:
        web.run_app(
            server.app(),
            host=config.host,
            port=config.port,
            access_log=None,
            shutdown_timeout=2.0,
            print=lambda _: print(said, flush=True),
        )
    except OSError as error:
        raise RequestError(
            f"{config.host}:{config.port} cannot be listened at: {error.strerror or error}. Give another --serve.port."
        ) from error
