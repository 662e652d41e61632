"""Take screenshots for people to look at, and check what a program can check: ``make screenshots``.

    make docs
    python examples/monitor.py                        # the run whose report is shown
    pip install playwright pyte && playwright install chromium
    python -m docs.screenshots                        # --browser "$(command -v chromium)" for an installed browser

Pictures are in build/screenshots: the site's start page, a search, and the report, as a desktop and a phone show them;
the terminal view, `lightning-asgd status --watch`, of a real run; and the charts that `wandb leet` draws of an offline
run of the program of docs/monitoring.md. Options of the browser come last: ``-- --no-sandbox`` if root starts it.

Every page of the site is checked on both, in the light and in the dark theme. Exits with 1 if one is wider than the
screen, if a text's contrast is below 4.5 (WCAG 2.2, 1.4.3, level AA), if a page has no title, no language or not one
h1, an image no alternative text, a link or button no text, if an image or script failed, or if the search does not find
what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyte
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

from benchmarks import newcomer

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "docs"
REPORT = ROOT / "results" / "monitor" / "report"
PICTURES = ROOT / "build" / "screenshots"
DEVICES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
THEMES = ("light", "dark")
CONTRAST = 4.5
SEARCHED, FOUND = "staleness", "Concepts"
TERMINAL = (16, 110)  # rows, columns
FRAMES, WATCH_S = 3, 60.0
CHARTS = (41, 170)  # rows, columns, of wandb's
BACKGROUND = b"\x1b]11;rgb:2828/2828/2828\x1b\\"  # a terminal's answer to the question for it

# Texts whose colour is too near to what lies behind them, each with its contrast. Transparent colours are laid over
# what is behind. Left out is what is not shown: texts for screen readers, links that only a pointer brings up.
CONTRASTS = """(least) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parsed = new Map();
  const parse = (text) => {
    if (!parsed.has(text)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      parsed.set(text, [r, g, b, a / 255]);
    }
    return parsed.get(text);
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const luminance = (colour) => colour.slice(0, 3)
    .map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    if (!element) return parse(getComputedStyle(document.documentElement).colorScheme === 'dark' ? 'black' : 'white');
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || element.closest('script, style, noscript, .headerlink, .visually-hidden, svg')) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const box = element.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) continue;
    const back = behind(element), front = over(parse(getComputedStyle(element).color), back);
    const [dark, bright] = [luminance(front), luminance(back)].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    const name = `${element.tagName}.${element.className}`;
    if (contrast < least) found.set(`${contrast.toFixed(2)} ${name}`, text.slice(0, 40));
  }
  return [...found].map(([what, text]) => `${what}: ${text}`);
}"""

# What readers with a screen reader, and search engines, miss.
MISSING = """() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const name = (e) => [e.ariaLabel, e.textContent, e.title, e.querySelector('img')?.alt].join('').trim();
  const heads = all('h1').length;
  return [
    document.title.trim() ? '' : 'no title',
    document.documentElement.lang ? '' : 'no language',
    heads === 1 ? '' : `${heads} h1`,
    ...all('img').filter((e) => !e.alt.trim()).map((e) => `no alternative text of ${e.src}`),
    ...all('img').filter((e) => e.complete && !e.naturalWidth).map((e) => `no image ${e.src}`),
    ...all('svg[role=img]').filter((e) => !name(e)).map((e) => `no title of ${e.outerHTML.slice(0, 80)}`),
    ...all('a[href], button').filter((e) => !name(e)).map((e) => `no text in ${e.outerHTML.slice(0, 80)}`),
  ].filter(Boolean);
}"""


# ---------------------------------------------------------------------- the browser


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder's address. The search fetches pages, which browsers forbid to files."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Camera:
    """Opens pages, keeps pictures of them, and notes what is wrong with them.

    Args:
        playwright: what drives the browser.
        browser: its program; None for the one that `playwright install` has brought.
        options: of the browser.
    """

    def __init__(self, playwright: Playwright, browser: str | None, options: list[str]) -> None:
        self._launch = partial(playwright.chromium.launch, executable_path=browser, args=options)
        self.wrong: list[str] = []

    @contextlib.contextmanager
    def page(self, device: str, theme: str = "light") -> Iterator[Page]:
        """A page, in a browser of its own: some builds show one only."""
        browser: Browser = self._launch()
        try:
            page = browser.new_page(viewport=DEVICES[device], color_scheme=theme)
            page.on("console", lambda said: self._hear(page, said))
            page.on("pageerror", lambda error: self.note(f"{page.url}: {error}"))
            yield page
        finally:
            browser.close()

    def _hear(self, page: Page, said: ConsoleMessage) -> None:
        """Note an error of a served page. A report has no icon."""
        if said.type == "error" and "127.0.0.1" in page.url and not said.location["url"].endswith("favicon.ico"):
            self.note(f"{page.url}: {said.text}")

    def note(self, what: str) -> None:
        """Say what is wrong, and remember it."""
        self.wrong.append(what)
        print(f"WRONG: {what}")

    def keep(self, page: Page, name: str, *, whole: bool = True) -> None:
        """Keep a picture of a page, or of what the screen shows of it."""
        file = PICTURES / f"{name}.png"
        page.screenshot(path=file, full_page=whole)
        print(file.relative_to(ROOT))

    def check(self, page: Page, name: str) -> None:
        """Whether a page is as wide as the screen, can be read, and lacks nothing."""
        width, screen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if width > screen:
            self.note(f"{name} is {width} pixels wide, on a screen of {screen}")
        for text in page.evaluate(CONTRASTS, CONTRAST):
            self.note(f"{name}: contrast {text}")
        for text in page.evaluate(MISSING):
            self.note(f"{name}: {text}")


# ---------------------------------------------------------------------- what is shown


def try_checks(camera: Camera) -> None:
    """See that the checks notice a page that is wrong."""
    with camera.page("phone") as page:
        page.set_content('<p style="color: #999; width: 500px">grey <a href="#"></a><img></p><script>none()</script>')
        camera.check(page, "A page that is wrong on purpose")
    if len(camera.wrong) != 9:
        raise AssertionError(f"The checks found {camera.wrong}. Expected nine things that are wrong.")
    camera.wrong.clear()


def site(camera: Camera, address: str) -> None:
    """Every page is checked; the first one is kept."""
    names = sorted(str(file.relative_to(SITE)) for file in SITE.rglob("*.html"))
    for device, theme in itertools.product(DEVICES, THEMES):
        with camera.page(device, theme) as page:
            for name in names:
                page.goto(f"{address}/{name}")
                camera.check(page, f"{name}, {device}, {theme}")
            page.goto(f"{address}/index.html")
            camera.keep(page, f"index-{device}-{theme}")
    print(f"Checked {len(names)} pages on {len(DEVICES)} devices in {len(THEMES)} themes")


def search(camera: Camera, address: str) -> None:
    for device, theme in itertools.product(DEVICES, THEMES):
        with camera.page(device, theme) as page:
            page.goto(f"{address}/search.html?q={SEARCHED}")
            page.wait_for_selector("#search-results .search-summary:has-text('found')", timeout=20_000)
            titles = page.locator("#search-results li > a").all_inner_texts()
            if FOUND not in titles:
                camera.note(f"A search for {SEARCHED!r} found {titles}, and not {FOUND!r}")
            camera.check(page, f"search, {device}, {theme}")
            camera.keep(page, f"search-{device}-{theme}", whole=False)


def report(camera: Camera, address: str) -> None:
    for device, theme in itertools.product(DEVICES, THEMES):
        with camera.page(device, theme) as page:
            page.goto(f"{address}/report.html")
            camera.check(page, f"report, {device}, {theme}")
            camera.keep(page, f"report-{device}-{theme}")


def terminal(camera: Camera) -> None:
    """What `lightning-asgd status --watch` shows while two workers train."""
    with tempfile.TemporaryDirectory() as name, run(Path(name)) as address:
        frame = watched(address)
    screen = Console(record=True, file=open(os.devnull, "w"), width=TERMINAL[1])  # noqa: SIM115
    screen.print(Text.from_ansi(frame))
    text = screen.export_text(clear=False)
    if not re.search(r"1 chief .*\d ms .*%", text):
        camera.note(f"The terminal shows no chief that trains:\n{text}")
    keep_screen(camera, screen, "status", "lightning-asgd status --watch")


def keep_screen(camera: Camera, screen: Console, name: str, title: str) -> None:
    """Write what a terminal shows as SVG and PNG."""
    picture = PICTURES / f"{name}.svg"
    screen.save_svg(str(picture), title=title)
    with camera.page("desktop") as page:
        page.set_content(f'<body style="margin: 0">{picture.read_text()}</body>')
        page.locator("svg").first.screenshot(path=picture.with_suffix(".png"), omit_background=True)
        print(picture.relative_to(ROOT), picture.with_suffix(".png").relative_to(ROOT))


def charts(camera: Camera) -> None:
    """What Weights & Biases' own terminal program draws of an offline run with two workers."""
    with tempfile.TemporaryDirectory() as name:
        machine = newcomer.Machine(Path(name), _environment())
        code = newcomer.block(newcomer.MONITORING, "python", "offline=True")
        program = newcomer.changed(newcomer.block(newcomer.ONE_MACHINE, "python", "class Digits"), code)
        (machine.folder / "train.py").write_text(program)
        machine.run("python train.py")
        shown = drawn(machine.folder)
    text = "\n".join(shown.display)
    if "asgd/staleness" not in text or "asgd/samples_per_s" not in text:
        camera.note(f"The charts are not those of asynchronous training:\n{text}")
    left = shown.display[0].index("Metrics") - 1  # beside it stands what machine this is
    right = shown.display[0].index("│", left)
    screen = Console(record=True, file=open(os.devnull, "w"), width=right - left)  # noqa: SIM115
    for row in range(CHARTS[0] - 1):
        line = Text()
        for column in range(left, right):
            cell = shown.buffer[row][column]
            line.append(cell.data, Style(color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold))
        screen.print(line, no_wrap=True)
    keep_screen(camera, screen, "wandb", "wandb leet")


def _colour(name: str) -> str | None:
    """A colour of a terminal's cell, as rich calls it."""
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name.replace("brown", "yellow")


def drawn(folder: Path) -> pyte.Screen:
    """The screen of `wandb leet` once it has read the latest run of a folder."""
    screen = pyte.Screen(CHARTS[1], CHARTS[0])
    stream, deadline = pyte.ByteStream(screen), time.monotonic() + WATCH_S
    settled = time.monotonic()
    with on_terminal([str(Path(sys.executable).parent / "wandb"), "leet"], CHARTS, folder) as terminal:
        while time.monotonic() < min(deadline, settled + 5.0):
            if select.select([terminal], [], [], 0.1)[0]:
                seen = os.read(terminal, 1 << 16)
                stream.feed(seen)
                settled = time.monotonic() if b"asgd/" not in "".join(screen.display).encode() else settled
                if b"\x1b]11;?" in seen:
                    os.write(terminal, BACKGROUND)
    return screen


@contextlib.contextmanager
def run(folder: Path) -> Iterator[str]:
    """Servers and two workers on this machine, by the pages' commands; where they serve."""
    machine = newcomer.Machine(folder, _environment())
    logs = [folder / name for name in ("serve.log", "1.log", "2.log")]
    servers = machine.start("lightning-asgd serve 127.0.0.1:0/digits", logs[0])
    with newcomer.ended(servers):
        newcomer.until(lambda: "run=" in logs[0].read_text(), "the servers' start", *logs[:1])
        address = logs[0].read_text().partition('run="')[2].partition('"')[0]
        watched = f"""
from lightning_asgd import ASGDMonitor, ASGDStrategy
Trainer(devices=1, max_epochs=-1, callbacks=[ASGDMonitor()], strategy=ASGDStrategy(run="{address}"))
"""
        program = newcomer.block(newcomer.ONE_MACHINE, "python", "class Digits")
        (folder / "train.py").write_text(newcomer.changed(program, watched))
        with newcomer.ended(*(machine.start("python train.py", log) for log in logs[1:])):
            newcomer.until(lambda: newcomer.both_came(logs[1:]), "the joining of both workers", *logs)
            yield address


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def on_terminal(command: list[str], size: tuple[int, int], folder: Path | None = None) -> Iterator[int]:
    """Run a command on a terminal of so many rows and columns, whose other end this is."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder)
    os.close(theirs)
    try:
        yield ours
    finally:
        process.send_signal(signal.SIGINT)
        os.close(ours)
        process.wait(20)


def watched(address: str) -> str:
    """The last frame of the view, with its colours."""
    command = [str(Path(sys.executable).parent / "lightning-asgd"), "status", address, "--watch"]
    seen, deadline = b"", time.monotonic() + WATCH_S
    with on_terminal(command, TERMINAL) as terminal:
        while seen.count(b"\x1b[H") <= FRAMES and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 1 << 16)
    whole = seen.split(b"\x1b[H")[-2]  # the last one may have been cut
    return re.sub(r"\x1b\[\?\d+[hl]", "", whole.decode()).replace("\r", "").rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", help="a browser of the Chromium family")
    parser.add_argument("options", nargs="*", help="of the browser")
    args = parser.parse_args()
    for needed, made in (
        (SITE / "index.html", "make docs"),
        (REPORT / "report.html", "python examples/monitor.py"),
    ):
        if not needed.is_file():
            sys.exit(f"There is no {needed.relative_to(ROOT)}. Run `{made}` first.")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        camera = Camera(playwright, args.browser, args.options)
        try_checks(camera)
        with served(SITE) as address:
            site(camera, address)
            search(camera, address)
        with served(REPORT) as address:
            report(camera, address)
        terminal(camera)
        charts(camera)
    print(f"{len(camera.wrong)} things are wrong" if camera.wrong else "The program has found nothing wrong.")
    return 1 if camera.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
