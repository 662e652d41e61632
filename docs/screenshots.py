"""Take pictures of the site's start page, as a desktop and a phone show it, in both themes, to look at.

    make docs
    pip install playwright
    python docs/screenshots.py --browser "$(command -v chromium)"     # or chrome, or microsoft-edge
    python docs/screenshots.py --browser ... --page concepts.html

They lie in build/screenshots. Options of the browser come last: ``-- --no-sandbox`` where root starts it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

BUILD = Path(__file__).resolve().parent.parent / "build"
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", required=True, help="a browser of the Chromium family")
    parser.add_argument("--page", default="index.html", help="below build/docs")
    parser.add_argument("options", nargs="*", help="of the browser")
    args = parser.parse_args()
    folder = BUILD / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        for device, size in SIZES.items():
            for theme in ("light", "dark"):
                browser = playwright.chromium.launch(executable_path=args.browser, args=args.options)
                page = browser.new_page(viewport=size, color_scheme=theme)
                page.goto((BUILD / "docs" / args.page).as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                name = f"{Path(args.page).with_suffix('').as_posix().replace('/', '-')}-{device}-{theme}.png"
                page.screenshot(path=folder / name, full_page=True)
                print(folder / name, "" if wide <= size["width"] else f"too wide: {wide} of {size['width']} pixels")
                browser.close()


if __name__ == "__main__":
    main()
