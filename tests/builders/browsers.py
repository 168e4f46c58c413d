"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver program, and no port.

It is CHROMIUM, or one that PATH has. Each page is a tab; what a page or a worker of it logs as an error, or throws, is
kept.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from fcntl import F_DUPFD, fcntl
from functools import partial
from pathlib import Path
from typing import Any

import trio

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--hide-scrollbars", "--ignore-certificate-errors", "--disable-extensions", "--force-color-profile=srgb"),
)
BETWEEN_LOOKS_S = 0.05
HIGH = 100  # beyond the descriptors that the child is to have
KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}


class Browser:
    """One process. Each call has an id; answers come in any order."""

    def __init__(self, to: trio.abc.SendStream, from_: trio.abc.ReceiveStream, nursery: trio.Nursery) -> None:
        self._to, self._from, self._lock, self._nursery = to, from_, trio.Lock(), nursery
        self._next, self._waiting = 0, dict[int, trio.MemorySendChannel[Any]]()
        self._tabs: dict[str, Tab] = {}

    async def read(self) -> None:
        text = b""
        while piece := await self._from.receive_some(1 << 20):
            *messages, text = (text + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._waiting.pop(message["id"]).send_nowait(message)
                elif tab := self._tabs.get(message.get("sessionId", "")):
                    tab.take(message)
                    if message["method"] == "Target.attachedToTarget":
                        self._nursery.start_soon(self._join, message["params"]["sessionId"], tab)

    async def _join(self, session: str, tab: Tab) -> None:
        """Take what a worker of a tab does for what the tab does, from its beginning."""
        self._tabs[session] = tab
        for method in ("Runtime.enable", "Log.enable", "Network.enable", "Runtime.runIfWaitingForDebugger"):
            with suppress(AssertionError):  # it may have ended, or have none of this
                await self.call(method, session)

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        self._next += 1
        number, (answer, answered) = self._next, trio.open_memory_channel[Any](1)
        self._waiting[number] = answer
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        async with self._lock:
            await self._to.send_all(json.dumps(message).encode() + b"\0")
        found = await answered.receive()
        assert "error" not in found, (method, found["error"])
        return found["result"]

    async def tab(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> Tab:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = self._tabs[session] = Tab(partial(self.call, session=session))
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        await tab.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)
        await tab.size(width, height)
        await tab.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        await tab.go(url)
        return tab


class Tab:
    """One page. `errors`: what it threw or logged as an error; `asked`: the URLs and fields of its requests."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.errors, self.asked = call, list[str](), list[tuple[str, dict[str, str]]]()
        self._traced, self._trace_ended = list[dict[str, Any]](), trio.Event()

    def take(self, event: dict[str, Any]) -> None:
        method, params = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append((params["request"]["url"], params["request"]["headers"]))
        elif method == "Tracing.dataCollected":
            self._traced += params["value"]
        elif method == "Tracing.tracingComplete":
            self._trace_ended.set()

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What an expression is in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """What an expression is as soon as it is true."""
        while not (found := await self.value(script)):  # noqa: ASYNC110  # the page wakes nobody
            await trio.sleep(BETWEEN_LOOKS_S)
        return found

    async def sees(self, words: str) -> None:
        await self.until(f"document.body?.innerText.includes({json.dumps(words)})")

    async def click(self, selector: str) -> None:
        """Click in the middle of an element as soon as it is there."""
        quoted = json.dumps(selector)
        await self.until(f"Boolean(document.querySelector({quoted}))")
        x, y = await self.value(
            f"(() => {{ const e = document.querySelector({quoted}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            code = KEY_CODES.get(key, ord(key[0].upper()))
            await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    @asynccontextmanager
    async def tasks(self) -> AsyncIterator[list[float]]:
        """How long each task of the page's own thread took in the block, once that is over: ms of processor time."""
        self._traced, self._trace_ended, found = [], trio.Event(), list[float]()
        categories = {"includedCategories": ["disabled-by-default-devtools.timeline"]}
        await self.call("Tracing.start", traceConfig=categories, transferMode="ReportEvents")
        yield found
        await self.call("Tracing.end")
        await self._trace_ended.wait()
        named = (each for each in self._traced if each["name"] == "thread_name")
        mine = {(each["pid"], each["tid"]) for each in named if each["args"]["name"] == "CrRendererMain"}
        whole = (each for each in self._traced if each["name"] == "RunTask" and (each["pid"], each["tid"]) in mine)
        found += sorted(each["tdur"] / 1000 for each in whole if "tdur" in each)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await trio.Path(path).write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """A browser with its profile in this folder. It ends with the block."""
    assert BROWSER is not None
    (its_in, to_fd), (from_fd, its_out) = os.pipe(), os.pipe()
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]

    def descriptors() -> None:
        """Chromium reads descriptor 3 and writes descriptor 4."""
        for number, end in ((3, fcntl(its_in, F_DUPFD, HIGH)), (4, fcntl(its_out, F_DUPFD, HIGH))):
            os.dup2(end, number)

    async with trio.open_nursery() as nursery:
        start = partial(
            trio.run_process, command, preexec_fn=descriptors, pass_fds=(3, 4), stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        process: trio.Process = await nursery.start(start)
        os.close(its_in)
        os.close(its_out)
        to, from_ = trio.lowlevel.FdStream(to_fd), trio.lowlevel.FdStream(from_fd)
        made = Browser(to, from_, nursery)
        nursery.start_soon(made.read)
        try:
            yield made
        finally:  # without a checkpoint: Cancelled would take the place of what a test raises
            process.kill()
            nursery.cancel_scope.cancel()
            to.close()
            from_.close()
