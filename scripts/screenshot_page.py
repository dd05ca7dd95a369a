"""Photographs the server's page while it answers: starts a server, keeps it busy, asks, points at a token.

    python scripts/screenshot_page.py --out docs/chat-page.png
    python scripts/screenshot_page.py --dark --out dark.png -- path/to/model --kv-memory 1GiB

What follows `--` are arguments of `runtime serve`, the model first; without any it is the bundled model with so little
room that every plot has something to tell. Needs the `test` extra and a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bench.run import run_server

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = "He opened the door and"
EARLIER = ["Explain what a list is in Python, with an example.", "Write a short letter to an old friend."]
SAMPLING = {"temperature": 0.6, "seed": 10, "max_tokens": 110}
SERVE = ["demo", "--kv-memory", "2MiB", "--max-num-seqs", "3", "--speculative-model", "ngram"]
BUSY_SECONDS = 55
LOAD = ["--max-concurrency", "5", "--num-prompts", "1000", "--prefix-len", "72", "--output-len", "40:300"]
TYPICAL_DOUBT = 0.4
SIZE = {"width": 1320, "height": 820}


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Clients that come and go, with texts of several lengths that begin alike."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.cli", "bench", "--url", url, *LOAD],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def photograph(url: str, out: Path, dark: bool) -> None:
    """One picture of the page with an answer and the alternatives of one that was in doubt."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no Chromium on PATH. Install it, for example with 'apt install chromium'.")
    with sync_playwright() as playwright, busy(url):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport=SIZE, device_scale_factor=1.5, color_scheme="dark" if dark else "light")
        page = context.new_page()
        page.goto(url)
        time.sleep(BUSY_SECONDS)  # the plots fill
        for name, value in SAMPLING.items():
            page.fill(f"#{name}", str(value))
        for prompt in EARLIER:
            ask(page, prompt)
            page.click("#new")
        page.click("#probabilities")
        page.check("input[value=text]", force=True)
        ask(page, PROMPT)
        doubts = "tokens => tokens.map(token => Number(token.style.getPropertyValue('--doubtful')))"
        found = page.locator(".token").evaluate_all(doubts)
        page.locator(".token").nth(min(range(20, len(found)), key=lambda i: abs(found[i] - TYPICAL_DOUBT))).hover()
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=out)
        browser.close()


def ask(page: Page, prompt: str) -> None:
    """Sends a message, and waits for the answer."""
    page.fill("#message", prompt)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn[data-state=done]", timeout=120_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("chat-page.png"), help="the picture to write")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("serve", nargs="*", metavar="-- ARGUMENT", help="given to 'runtime serve'")
    arguments = parser.parse_args()
    model, *options = arguments.serve or SERVE
    with run_server(Path(model), options) as server:
        photograph(server.url, arguments.out, arguments.dark)
    print(f"wrote {arguments.out} ({arguments.out.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
