"""A headless chromium, spoken to over a pipe in its DevTools protocol: nothing to install but the browser itself."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What the browser is called; an environment variable FREEMOE_CHROMIUM names another."""

KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowDown": (40, ""), " ": (32, " ")}
"""Key, by the name that the DOM has for it -> its number, and what it writes."""

STICKING_OUT = """(() => {
  const room = document.documentElement.clientWidth, found = [];
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || e.closest('defs')) continue;
    if (box.right > room + 0.5 || box.left < -0.5)
      found.push(`${e.tagName} ${e.id} ${Math.round(box.left)}..${Math.round(box.right)} ${e.textContent.trim().slice(0, 40)}`);
  }
  return {scroll: document.documentElement.scrollWidth, room, found};
})()"""
"""What leaves a page at its sides."""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find():
    """The browser of this machine, or None."""
    named = os.environ.get("FREEMOE_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of a running browser."""

    def __init__(self, process, write, read, patience=60.0):
        self.process, self.write, self.read, self.patience = process, write, read, patience
        self.number, self.rest, self.session = 0, b"", None
        self.events = []
        self.own = ()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        """Send a command and wait for its answer; what happens in between is kept in ``events``."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self.events.append(found)

    def wait(self, event):
        """Wait until an event has come."""
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._next())

    def _next(self):
        until = time.monotonic() + self.patience
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self.patience:.0f} s")
            part = os.read(self.read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.rest += part
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page, width, theme="light", height=900, motion="no-preference"):
        """Load a page, a file or an address, in a window of a width, in a theme, with or without ("reduce") movement."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        media = {"prefers-color-scheme": theme, "prefers-reduced-motion": motion}
        self.ask("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in media.items()])
        self.events.clear()
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self.own = ("file:", "data:") if isinstance(page, Path) else (page,)
        self.ask("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def run(self, expression):
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def until(self, condition, patience=30.0):
        """Wait until an expression in the page is true, as JavaScript has it."""
        end = time.monotonic() + patience
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"after {patience:.0f} s still not: {condition}"
            time.sleep(0.02)

    def type(self, text):
        """Put text where the focus is, as a keyboard does."""
        self.ask("Input.insertText", text=text)

    def press(self, key, shift=False):
        """Press one of `KEYS`."""
        code, text = KEYS[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **told)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **told)

    def click(self, element):
        """Press the mouse in the middle of an element, given as an expression; what covers it gets the click."""
        place = self.run(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'nearest'}}); const b = e.getBoundingClientRect();"
            " return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def complaints(self):
        """What the page logged, threw or asked the network for, but its own files, since it was opened."""
        found = []
        for event in self.events:
            method, told = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"].get("text")))
            elif method == "Runtime.consoleAPICalled":
                found.append(f"console.{told['type']}")
            elif method == "Log.entryAdded":
                found.append(f"{told['entry']['level']}: {told['entry']['text']}")
            elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(self.own):
                found.append(f"request: {told['request']['url']}")
        return found

    def picture(self, path, clip=None):
        """A PNG of the whole page, or of a part of it: x, y, width and height in pixels."""
        if clip is None:
            box = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 16000)}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1})
        path.write_bytes(base64.b64decode(shot["data"]))


def _pipe():
    """A pipe whose ends have high numbers."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in ends)
    for end in ends:
        os.close(end)
    return high


@contextlib.contextmanager
def browser(program):
    """Start a browser with a profile of its own; both are gone afterwards."""
    # Its end of the pipes is 3 and 4; ours are moved out of the way of these numbers.
    (their_read, our_write), (our_read, their_write) = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = os.posix_spawn(
            program,
            [program, *_FLAGS, f"--user-data-dir={profile}"],
            {**os.environ, "HOME": profile},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, their_read, 3),
                (os.POSIX_SPAWN_DUP2, their_write, 4),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(their_read)
        os.close(their_write)
        try:
            tab = Browser(process, our_write, our_read)
            yield tab
            with contextlib.suppress(Exception):
                tab.session = None
                tab.ask("Browser.close")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
            os.close(our_write)
            os.close(our_read)
