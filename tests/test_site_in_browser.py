"""The built site: its links, and its pages in a real browser, without a network.

Takes the folder that `python -m sphinx docs FOLDER` built: `FLASHSIM_SITE=FOLDER pytest ...`.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import threading
import zlib
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

import flashsim as fs
from flashsim.viewer import view

SITE = Path(os.environ.get("FLASHSIM_SITE", "")).resolve()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

pytestmark = pytest.mark.skipif(
    "FLASHSIM_SITE" not in os.environ, reason="needs the built site in FLASHSIM_SITE"
)
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium: apt-get install --no-install-recommends chromium"
)

WIDE, PHONE = (1440, 900), (390, 844)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
TEXT = {"img": "alt", "iframe": "title"}  # what a screen reader says of it


class Page(HTMLParser):
    """The links of a page, the files that it loads, the places that a link can lead to, and texts.

    A text stands for a picture or a frame.
    """

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.places, self.texts = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get(LOADED.get(tag)) and given.get("rel") not in (
            "index",
            "search",
            "next",
            "prev",
        ):
            self.loads.append(given[LOADED[tag]])
        if tag in TEXT:
            self.texts.append((given.get("src"), given.get(TEXT[tag])))


@pytest.fixture(scope="module")
def pages():
    return {path: Page(path.read_text("utf-8")) for path in sorted(SITE.rglob("*.html"))}


def outside(url):
    return bool(urlsplit(url).netloc) or urlsplit(url).scheme in ("http", "https")


# --- files ----------------------------------------------------------------------------------------


def test_every_link_leads_to_a_page_and_a_place_on_it(pages):
    assert pages
    lost = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            url, place = urldefrag(link)
            if outside(url) or url.startswith(("data:", "mailto:")):
                continue
            target = (path.parent / unquote(url.partition("?")[0])).resolve() if url else path
            there = target.is_file()
            if there and place and target in pages:
                there = unquote(place) in pages[target].places
            lost += [(path.name, link)] * (not there)
    assert lost == []


def test_no_file_asks_for_anything_from_outside(pages):
    asked = [(path.name, url) for path, page in pages.items() for url in page.loads if outside(url)]
    for path in SITE.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", path.read_text("utf-8"))
        asked += [(path.name, url) for url in urls if outside(url)]
    assert asked == []


def test_every_picture_and_every_frame_is_told_of_in_words(pages):
    file_name = re.compile(r"[0-9a-f]{16}|\.(png|svg|jpe?g|gif|webp)\b", re.IGNORECASE)
    texts = [(path.name, *shown) for path, page in pages.items() for shown in page.texts]
    assert texts
    assert [x for x in texts if not (x[2] or "").strip() or file_name.search(x[2])] == []


def test_every_public_function_and_class_with_a_docstring_is_in_the_api():
    inventory = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    there = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    pages = {path.stem for path in (SITE / "_api").glob("*.html")}
    assert "flashsim.attention" in pages
    missing = []
    for name in pages:
        module = import_module(name)
        for what, thing in vars(module).items():
            own = inspect.isfunction(thing) or inspect.isclass(thing)
            if own and thing.__module__ == name and thing.__doc__ and not what.startswith("_"):
                missing += [f"{name}.{what}"] * (f"{name}.{what}" not in there)
    assert missing == []


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *what):
        pass


@pytest.fixture(scope="module")
def address():
    """The site as a server of this machine has it: a search reads pages, which files may not."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def tab(browser, address):
    """A way to open pages; in the end the console has no complaint, and nothing else was asked."""
    contexts, said, asked = [], [], []

    def open_tab(size=WIDE, scheme="null"):
        width, height = size
        context = browser.new_context(
            base_url=address, viewport={"width": width, "height": height}, color_scheme=scheme
        )
        context.set_default_timeout(10000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: said.append((page.url, m.type, m.text)))
        page.on("pageerror", lambda error: said.append((page.url, "error", str(error))))
        page.on("request", lambda request: asked.append(request.url))
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert [x for x in said if x[1] != "log"] == []
    assert [url for url in asked if not url.startswith((address, "data:", "about:srcdoc"))] == []


def go(page, name):
    page.goto(f"/{name}.html")
    return page


@in_browser
def test_no_page_scrolls_sideways_on_a_phone(tab, pages):
    page, wide = tab(PHONE), []
    for path in pages:
        page.goto(f"/{path.relative_to(SITE).as_posix()}")
        if page.evaluate("document.documentElement.scrollWidth") > PHONE[0]:
            wide.append(path.relative_to(SITE))
    assert wide == []


@in_browser
def test_the_viewer_on_the_first_page_plays_and_ends_at_the_closed_form(tab):
    shown = view("flash2")
    last = len(shown.recording) - 1
    page = go(tab(), "index")
    frame = page.frame_locator("iframe.view")
    expect(frame.locator("#position")).to_have_text(f"0 / {last}")
    frame.get_by_role("button", name="Play").click()
    expect(frame.locator("#position")).to_have_text(re.compile(rf"[2-9] / {last}"))
    frame.get_by_role("button", name="Pause").click()
    frame.locator("#slider").fill(str(last))
    expect(frame.locator("#traffic")).to_contain_text(f"= {shown.closed_form_elements}, as the")


@in_browser
def test_every_formula_is_set(tab):
    page = tab()
    for path in sorted((SITE / "algorithms").glob("*.html")):
        go(page, f"algorithms/{path.stem}")
        formulas = page.locator(".math").count()
        assert formulas
        expect(page.locator("mjx-container")).to_have_count(formulas)
        assert page.locator("mjx-merror, [data-mjx-error]").count() == 0


def number(text):
    return int(text.replace(",", ""))


@in_browser
@pytest.mark.parametrize("name", [name for name, row in fs.ALGORITHMS.items() if not row.requires])
def test_the_counts_on_an_algorithms_page_are_its_closed_form(tab, name):
    page = go(tab(), f"algorithms/{name}")
    tables = page.locator("table").filter(has_text="in all").all()
    told = page.locator("p").filter(has_text="A run at N =").all_inner_texts()
    assert len(tables) == 1 + bool(fs.ALGORITHMS[name].backward)
    for backward, (table, text) in enumerate(zip(tables, told, strict=True)):
        N, d, sram, Br, Bc = map(
            number,
            re.search(
                r"N = (\d+), d = (\d+), on a chip of ([\d,]+) .* (\d+) × (\d+);", text
            ).groups(),
        )
        what = {"splits": 2} if "splits" in fs.ALGORITHMS[name].options else {}
        cost = fs.io_cost(name, N=N, d=d, Br=Br, Bc=Bc, sram=sram, backward=bool(backward), **what)
        rows = [row.split() for row in table.locator("tbody tr").all_inner_texts()]
        counts = {" ".join(x): (number(read), number(written)) for *x, read, written in rows}
        assert counts.pop("in all") == (cost.read_elements, cost.written_elements)
        assert counts == {
            x: (cost.reads.get(x, 0), cost.writes.get(x, 0))
            for x in cost.reads.keys() | cost.writes.keys()
        }


@in_browser
def test_the_viewer_is_light_or_dark_as_the_page_is(tab):
    """The system, which is light here, does not count once the reader has chosen."""
    page = go(tab(), "index")
    frame = page.query_selector("iframe.view").content_frame()
    frame.wait_for_selector("#position")
    seen = {}
    for _ in range(3):  # automatic, light and dark, in some order
        page.wait_for_timeout(100)
        seen[page.get_attribute("body", "data-theme")] = frame.evaluate(
            "matchMedia('(prefers-color-scheme: dark)').matches"
        )
        page.locator(".theme-toggle:visible").click()
    assert seen == {"auto": False, "light": False, "dark": True}


@in_browser
def test_the_search_finds_a_name(tab):
    page = tab()
    page.goto("/search.html?q=io_cost")
    expect(page.locator("#search-results li").first).to_be_visible()
