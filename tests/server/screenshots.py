"""Pictures of the page for the README: `python -m tests.server.screenshots URL tests/server/screenshots`.

The server behind URL runs the real model: `make serve ARGS='--draft ngram --num-speculative-tokens 4'`. This
drives it with the browser of this machine, and checks nothing.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

CHAT = "List the days of the week, then list them again in reverse order."
RACE = "Write the list again and again: red, green, blue, yellow, purple, orange, black, white, red, green, blue."


def shoot(page: Any, path: Path) -> None:
    """A picture of few colours, which is a third of the bytes."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def take(page: Any, folder: Path, scheme: str) -> None:
    """One chat and one race, in one colour scheme."""
    page.locator("#prompt").fill(CHAT)
    page.locator("#prompt").press("Enter")
    page.wait_for_selector(".message.assistant small:has-text('ended by')", timeout=240_000)
    shoot(page, folder / f"page-chat-{scheme}.png")
    page.get_by_role("tab", name="Race").click()
    page.locator("#race-prompt").fill(RACE)
    page.evaluate("document.getElementById('max_tokens').value = 120")
    page.get_by_role("button", name="Race", exact=True).click()
    page.wait_for_selector("#verdict:has-text('texts')", timeout=240_000)
    shoot(page, folder / f"page-race-{scheme}.png")


def main() -> None:
    """Light and dark."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1100, "height": 820}, color_scheme=scheme)
            page.goto(args.url)
            take(page, args.folder, scheme)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
