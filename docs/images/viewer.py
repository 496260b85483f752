"""Makes viewer.png, the picture of the step viewer: `python docs/images/viewer.py CHROMIUM`

Playwright drives the Chromium of that path, as in tests/test_viewer_in_browser.py.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from flashsim.viewer import view

STEP = 66  # loads a tile, halfway through the followed row's second tile of queries

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[1])
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page.set_content(view("flash2").html())
    page.wait_for_function("document.getElementById('position').textContent")
    page.evaluate(f"go({STEP})")
    page.screenshot(path=Path(__file__).with_suffix(".png"))
    browser.close()
