"""A headless Chromium for tests, controlled by the DevTools protocol.

See https://chromedevtools.github.io/devtools-protocol/ for its commands.
"""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--renderer-process-limit=4",
    "--remote-debugging-port=0",
    "about:blank",
)
PATIENCE = 60.0
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def chromium() -> str | None:
    """Find the Chromium executable."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A browser tab."""

    def __init__(self, browser: "Browser", session: str, context: str):
        self.browser, self.session, self.context = browser, session, context

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self.browser.send(method, self.session, **parameters)

    async def go(self, address: str) -> None:
        await self.send("Page.navigate", url=address)

    async def run(self, script: str) -> Any:
        """Evaluate an expression, awaiting promises."""
        found = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    async def wait(self, script: str, patience: float = PATIENCE) -> Any:
        """Wait until an expression is true. An expression that throws, as while a page loads, counts as false."""
        end = asyncio.get_running_loop().time() + patience
        while asyncio.get_running_loop().time() < end:
            found = await self.send(
                "Runtime.evaluate",
                expression=f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()",
                returnByValue=True,
            )
            if value := found["result"].get("value"):
                return value
            await asyncio.sleep(0.05)
        text = await self.run("document.body.innerText")
        raise AssertionError(f"not within {patience} s: {script}; the page says: {text}")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        about = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    async def click(self, selector: str, times: int = 1) -> None:
        """Click the center of the first matching element; twice for a double click."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = await self.run(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    async def network(self, is_on: bool) -> None:
        """Disconnect or reconnect the network."""
        speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.send("Network.emulateNetworkConditions", offline=not is_on, **speed)

    async def size(self, width: int, height: int) -> None:
        """Set the size of the window. Below 500 px it emulates a phone."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    async def picture(self, path: Path) -> None:
        """Save a screenshot as PNG."""
        found = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


class Browser:
    """The browser process and the connection to it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.socket = socket
        self.numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.messages: list[str] = []
        """What pages wrote to their consoles, and errors that nobody caught."""

    async def read(self) -> None:
        async for message in self.socket:
            found = message.json()
            if "id" in found:
                self.waiting.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.messages.append(str(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded":
                self.messages.append(f"{found['params']['entry']['text']} {found['params']['entry'].get('url')}")

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        about = {"sessionId": session} if session else {}
        await self.socket.send_json({"id": number, "method": method, "params": parameters, **about})
        found = await asyncio.wait_for(self.waiting[number], PATIENCE)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    async def page(self, beside: Page | None = None) -> Page:
        """Open a tab with a new profile, or with the profile of another tab."""
        context = beside.context if beside else (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"], context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.send(f"{domain}.enable")
        return page


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Start a new browser for the duration of the context."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            program, f"--user-data-dir={home}", *FLAGS, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            port = Path(home) / "DevToolsActivePort"
            for _ in range(int(PATIENCE * 10)):
                if port.exists() and port.read_text().count("\n"):
                    break
                await asyncio.sleep(0.1)
            number, path = port.read_text().split()
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"ws://127.0.0.1:{number}{path}", max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                reading = asyncio.create_task(browser.read())
                yield browser
                reading.cancel()
        finally:
            process.kill()
            await process.wait()
