"""The viewer's page in a real browser: its controls do what they say, its numbers are the run's.

Chromium is Debian's; Playwright drives it and downloads none of its own.
"""

from __future__ import annotations

import itertools
import re
import shutil

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

from flashsim import ALGORITHMS, failures
from flashsim.record import record
from flashsim.viewer import View, random_head, view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium: apt-get install --no-install-recommends chromium"
)

WIDE, NOTEBOOK, PHONE = (1440, 900), (860, 860), (360, 740)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens HTML; in the end no message may be in the console, and no request but for the page."""
    contexts, messages, requests, files = [], [], [], itertools.count()

    def open_(text, size=WIDE, **options):
        width, height = size
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(5000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        file = tmp_path / f"{next(files)}.html"
        file.write_text(text, "utf-8")
        page.on("request", lambda r: None if r.url == file.as_uri() else requests.append(r.url))
        page.goto(file.as_uri())
        if 'id="position"' in text.partition("<iframe")[0]:
            page.wait_for_function("() => document.getElementById('position').textContent")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert messages == []
    assert [url for url in requests if url != "about:srcdoc"] == []


@pytest.fixture(scope="module")
def views():
    names = "flash2", "flash1", "standard"
    found = {(name, back): view(name, backward=back) for name in names for back in (False, True)}
    found["flash1", False] = view("flash1", tiles=(4, 4), sram=200)  # more than it takes
    return found | {("fault", False): failures.show("skip-rescale").view()}


@pytest.fixture(scope="module")
def forward(views):
    return views["flash2", False]


def position(page):
    """The number of the step that is shown; slider and text must agree."""
    text, value = page.inner_text("#position"), page.input_value("#slider")
    assert text.split(" / ")[0] == value
    assert page.inner_text("#did").startswith(f"Step {value}, line ")
    return int(value)


def go(page, step):
    page.locator("#slider").fill(str(step))
    assert position(page) == step


def number(text):
    """A number as the page writes it."""
    text = text.replace("−", "-").replace("∞", "inf").replace(",", "").replace("≠", "")
    return float(text)


# --- the controls ---------------------------------------------------------------------------------


def test_buttons_step_and_step_back_and_stop_at_the_ends(opened, forward):
    page, last = opened(forward.html()), len(forward.recording) - 1
    step = page.get_by_role("button", name="Step", exact=True)
    back = page.get_by_role("button", name="Step back")
    assert position(page) == 0
    back.click(force=True)  # it says that it is disabled, and keeps the focus
    assert position(page) == 0
    for n in range(1, 4):
        step.click()
        assert position(page) == n
    back.click()
    assert position(page) == 2
    go(page, last)
    step.click(force=True)
    assert position(page) == last


def test_keys_do_what_the_help_says(opened, forward):
    page, last = opened(forward.html()), len(forward.recording) - 1
    for key, expected in [
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last),
        ("ArrowLeft", last - 1), ("Home", 0), ("ArrowLeft", 0),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert position(page) == expected
    for key in "Control", "Alt", "Meta":  # what they mean with others is the browser's
        page.keyboard.press(f"{key}+ArrowRight")
        assert position(page) == 0
    page.focus("#slider")  # where the keys are the slider's own, and must count once
    for key, expected in ("ArrowRight", 1), ("End", last), ("Home", 0):
        page.keyboard.press(key)
        assert position(page) == expected
    page.focus("#followed")  # where they edit a number
    page.keyboard.press("ArrowRight")
    assert position(page) == 0
    page.focus("#forward")
    page.keyboard.press(" ")
    assert position(page) == 1
    assert page.get_by_role("button", name="Play").is_visible()


def test_the_slider_goes_to_any_step(opened, forward):
    page, last = opened(forward.html()), len(forward.recording) - 1
    assert page.get_attribute("#slider", "max") == str(last)
    for step in 7, last, 0, 99:
        go(page, step)
    line = forward.recording[99].line
    assert page.get_attribute("#slider", "aria-valuetext") == f"step 99 of {last}, line {line}"


def test_play_runs_at_its_speed_pauses_and_ends_at_the_last_step(opened, forward):
    page, last = opened(forward.html()), len(forward.recording) - 1
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # only `run_for` moves it
    page.select_option("#speed", label="2 a second")
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(2100)
    assert position(page) == 4
    assert page.get_attribute("#did", "aria-live") == "off"
    page.keyboard.press("ArrowRight")  # stepping pauses
    page.clock.run_for(2000)
    assert position(page) == 5
    assert page.get_attribute("#did", "aria-live") == "polite"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(" ")
    page.clock.run_for(600)
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(2000)
    assert position(page) == 6
    go(page, last - 2)
    page.select_option("#speed", label="20 a second")
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1000)
    assert position(page) == last
    page.get_by_role("button", name="Play").click()  # from the start again
    page.clock.run_for(120)
    assert position(page) == 2


def test_a_swipe_over_the_source_steps(opened, forward):
    page = opened(forward.html(), PHONE, has_touch=True)
    box = page.locator("#source").bounding_box()
    client = page.context.new_cdp_session(page)

    def swipe(x, y, dx, dy):
        for kind, points in (
            ("touchStart", [{"x": x, "y": y}]),
            ("touchMove", [{"x": x + dx, "y": y + dy}]),
            ("touchEnd", []),
        ):
            client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    # A scroller does not inherit this, and without it a swipe to the right may leave the page.
    for panned in "#code", "#source":
        allowed = f"getComputedStyle(document.querySelector('{panned}')).touchAction"
        assert page.evaluate(allowed) == "pan-y pinch-zoom"
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    last = len(forward.recording) - 1

    def arrives_at(step):  # a touch takes effect some time after it was sent
        expect(page.locator("#position")).to_have_text(f"{step} / {last}")

    swipe(x, y, -90, 5)
    arrives_at(1)
    swipe(x, y, -90, 5)
    arrives_at(2)
    swipe(x, y, 90, -5)
    arrives_at(1)
    # A scroll is none, nor is what goes both ways or is short; a swipe after it is the only step.
    for step, (dx, dy) in enumerate([(10, -80), (60, -50), (-20, 0)], 2):
        swipe(x, y, dx, dy)
        swipe(x, y, -90, 5)
        arrives_at(step)
    swipe(x, y, 90, -5)
    arrives_at(3)


def test_a_row_is_followed_by_its_number_or_by_a_click_on_the_map(opened, forward):
    page = opened(forward.html())
    go(page, len(forward.recording) - 1)
    assert page.input_value("#followed") == str(forward.row)

    def final():
        return number(page.locator("#turns .below").last.locator("span > span").last.inner_text())

    lse = forward.recording.result.lse
    assert final() == pytest.approx(lse[forward.row], rel=1e-3)
    for wanted, row in (9, 9), (2.7, 3), (99, 15), (-3, 0):
        page.fill("#followed", str(wanted))
        page.press("#followed", "Enter")
        assert page.input_value("#followed") == str(row)
        assert final() == pytest.approx(lse[row], rel=1e-3)
    canvas = page.locator("#map-read canvas").first
    height = canvas.bounding_box()["height"]
    canvas.click(position={"x": 20, "y": height * 12.5 / 16})
    assert page.input_value("#followed") == "12"
    assert final() == pytest.approx(lse[12], rel=1e-3)


# --- what it shows --------------------------------------------------------------------------------


SHOWN = """() => {
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const texts = (selector, of) => all(selector, of).map((x) => x.innerText);
  return {
    current: texts("[aria-current=step] span"),
    traffic: texts("#traffic .bar"),
    used: document.getElementById("used").innerText,
    tiles: texts("#tiles li"),
    loads: replay(k).loads.map((e) => D.names[e.name]),
    widths: all("#sram span").map((x) => parseFloat(x.style.width)),
    read: texts("#map-read figcaption"),
    write: texts("#map-write figcaption"),
    values: all("#changed .value").map((x) => ({
      name: x.querySelector("code").innerText,
      exact: all("td[title]", x).map((cell) => cell.title),
      rounded: texts("td[title]", x),
    })),
  };
}"""


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash1", "standard"])
def test_what_the_page_shows_is_what_was_recorded(opened, views, algorithm, backward):
    shown = views[algorithm, backward]
    run, page = shown.recording, opened(shown.html())
    last = len(run) - 1
    for n in sorted({0, 1, 5, last // 3, last // 2, last - 1, last}):
        go(page, n)
        step, traffic, found = run[n], run[n].traffic, page.evaluate(SHOWN)
        assert found["current"] == [str(step.line), run.source[step.function][step.line]]
        so_far, *standard = (text.replace(",", "") for text in found["traffic"])
        assert f"{traffic.read_elements} read + {traffic.written_elements} written" in so_far
        assert f"= {traffic.total_elements}" in so_far
        if algorithm == "standard":
            assert standard == []
        else:
            assert f"= {shown.standard.total_elements}" in standard[0]
        assert found["used"].replace(",", "") == (f"{step.used_elements} of {run.sram:g} elements")
        assert found["tiles"] == [f"{h.name} {h.elements}" for h in step.resident]
        loaded = [h.name for h in step.resident if h.name in run.hbm]
        assert sorted(found["loads"]) == sorted(loaded)
        shares = [100 * h.elements / run.sram for h in step.resident]
        assert found["widths"] == pytest.approx(shares, rel=1e-4)
        for kind, counts in ("read", traffic.reads), ("write", traffic.writes):
            captions = dict(caption.split() for caption in found[kind])
            assert {name: number(x) for name, x in captions.items() if x != "0"} == {
                name: x for name, x in counts.items() if x
            }
        assert [value["name"] for value in found["values"]] == list(step.changed)
        for x, value in zip(step.changed.values(), found["values"], strict=True):
            if isinstance(x, np.ndarray):
                exact = np.array(value["exact"], np.float32)
                assert exact.tobytes() == np.float32(x).tobytes()
                rounded = [number(text) for text in value["rounded"]]
                assert rounded == pytest.approx(np.float64(x).ravel(), rel=6e-3, nan_ok=True)


CURRENT = """() => steps.map((step) => {
  showSource(step); // what else is shown takes its time
  return [...document.querySelectorAll(".line.on")].map((x) => x.textContent);
})"""


HEADS = """() => [
  [...document.querySelectorAll("#turns thead th, .below > span > small")]
    .map((x) => x.textContent),
  $("turns").scrollWidth > $("turns").clientWidth,
]"""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_marks_the_line_that_ran_and_shows_the_row_whole(opened, algorithm):
    """The line at every step; the row at every width, without scrolling sideways."""
    for backward in (False, True)[: 1 + bool(ALGORITHMS[algorithm].backward)]:
        run = (shown := view(algorithm, N=8, d=5, backward=backward)).recording
        lines = [f"{step.line}{run.source[step.function][step.line]}" for step in run]
        page = opened(shown.html())
        assert page.evaluate(CURRENT) == [[line] for line in lines]
        assert page.evaluate("D.columns.length > 0") == page.is_visible("#row")
        for width, height in PHONE, NOTEBOOK, WIDE:
            page.set_viewport_size({"width": width, "height": height})
            page.evaluate("go(LAST)")
            heads, is_cut = page.evaluate(HEADS)
            assert set(heads) == {"tile", *page.evaluate("D.columns")}
            assert not is_cut


def test_the_map_says_how_often_a_row_was_read(opened, forward):
    page = opened(forward.html())
    go(page, len(forward.recording) - 1)
    labels = page.eval_on_selector_all("#map-read canvas", "c => c.map(x => x.ariaLabel)")
    assert labels == [
        "Q, read so far: rows 0 to 15 once, 64 elements",
        "K, read so far: rows 0 to 15 4 times, 256 elements",
        "V, read so far: rows 0 to 15 4 times, 256 elements",
    ]
    assert page.evaluate("panels.map(p => [...new Set(p.counts)])") == [[1], [4], [4], [1], [1]]


PIXELS = """() => panels.map((p) => {
  const copy = document.createElement("canvas");
  const paper = copy.getContext("2d", { willReadFrequently: true });
  [copy.width, copy.height] = [p.canvas.width, p.canvas.height];
  paper.drawImage(p.canvas, 0, 0);
  const middle = (x, r) => [...paper.getImageData(x, 2 + (r + 0.5) * cell, 1, 1).data];
  const rows = [...Array(p.rows).keys()];
  const inks = (place) => rows.map((r) => middle(place, r));
  const colours = inks(MARGIN + p.width / 2).map(([r, g, b]) => `rgb(${r}, ${g}, ${b})`);
  return [p.kind, [...p.counts], colours, rows.filter((r) => p.ofQueries && inks(2)[r][3])];
})"""
LEGEND = """() => ["reads", "writes"].map((id) =>
  [...$(id).querySelectorAll(".scale span")].map((x) => getComputedStyle(x).backgroundColor))"""


def test_the_map_has_the_colours_of_its_legend_and_a_mark_at_the_followed_row(opened, forward):
    page = opened(forward.html())
    for row, step in (6, 70), (13, len(forward.recording) - 1):
        page.fill("#followed", str(row))
        page.press("#followed", "Enter")
        go(page, step)
        legend = page.evaluate(LEGEND)
        assert [len(set(colours)) for colours in legend] == [5, 2]
        marked = []
        for kind, counts, colours, marks in page.evaluate(PIXELS):
            assert colours == [legend[kind][times] for times in counts]
            marked += marks
        assert marked == [row] * 3  # of Q, O and L


FRESH = """() => steps.map((step) => {
  showChip(step);
  return [...document.querySelectorAll("#sram .new")].map((x) => x.textContent);
})"""


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_tiles_that_a_step_brought_are_marked_and_no_others(opened, views, backward):
    shown = views["flash2", backward]
    for step, marked in zip(shown.recording, opened(shown.html()).evaluate(FRESH), strict=True):
        brought = {e.name for e in step.events if e.kind in ("read", "place", "replace")}
        assert marked == [held.name for held in step.resident if held.name in brought]


def test_the_map_legend_reads_as_a_range_where_its_colours_are_not_seen(opened, forward):
    page = opened(forward.html())
    legends = page.eval_on_selector_all(".times", "all => all.map(x => x.textContent)")
    assert legends == ["read: 0 to 4 times", "written: 0 to 1 time"]


def test_a_text_that_changed_is_shown_as_it_is_and_is_no_array(opened):
    page = opened(View(record(counts_up, np.arange(3.0))).html())
    for step, said in (0, "n = 0"), (1, "n = 1"):
        go(page, step)
        assert page.inner_text("#changed .value") == said
        assert page.evaluate("steps[k].changed.every((x) => x.array === undefined)")


def counts_up(x):
    n = 0
    n += 1
    return x[n]


def test_changed_numbers_are_marked_and_only_they(opened, forward):
    page, run = opened(forward.html(), (1920, 1080)), forward.recording
    step = next(
        s for s in run[40:]
        if "m_new" in s.changed and 0 < (s.changed["m_new"] > s.locals["mi"]).sum() < 4
    )  # fmt: skip
    go(page, step.number)
    marked = page.locator("#changed td").evaluate_all(
        "cells => cells.map(cell => cell.classList.contains('new-value'))"
    )
    before = next(s.changed["m_new"] for s in reversed(run[: step.number]) if "m_new" in s.changed)
    assert marked == (step.changed["m_new"] != before).tolist()
    for name, column in ("m_new", "m_new"), ("mi", "m_new"), ("li", "l"), ("Oi", "O so far"):
        step = next(s for s in run[20:] if name in s.changed)
        go(page, step.number)
        cells = page.locator("#turns tr.mine td").evaluate_all(
            "cells => cells.map(cell => cell.classList.contains('new-value'))"
        )
        heads = page.locator("#turns thead th").all_inner_texts()[1:]
        assert column in [head for head, new in zip(heads, cells, strict=True) if new]
        assert page.get_attribute("#turns tr.mine", "aria-current") == "true"


def test_a_fault_shows_the_wrong_value_beside_the_right_one(opened, views):
    shown = views["fault", False]
    comparison = failures.show("skip-rescale")
    page, run = opened(shown.html()), shown.recording
    assert page.is_visible("#note")
    assert "31.7766" in page.inner_text("#note")
    assert page.locator(".line.fault").count() == 1
    standard = shown.standard.total_elements
    assert page.locator("#traffic .bar").nth(1).inner_text().endswith(f"= {standard}")
    written = next(step.number for step in run if "O[0:1]" in step.changed)
    go(page, written)
    cell = page.locator("#changed td.wrong")
    wrong, right = cell.inner_text().split("right")
    assert number(wrong) == pytest.approx(comparison.wrong[0, 0], rel=1e-3)
    assert number(right) == pytest.approx(comparison.right[0, 0], rel=1e-3)
    go(page, 3)
    assert page.locator(".wrong").count() == 0


def test_of_a_faulty_array_the_wrong_numbers_alone_are_marked(opened):
    comparison = failures.show("skip-rescale", *random_head(8, 2, 3), tiles=(8, 4))
    differs = ~np.isclose(comparison.wrong, comparison.right, rtol=1e-5, atol=0)
    assert 0 < differs.sum() < differs.size
    shown = comparison.view()
    page = opened(shown.html())
    go(page, next(step.number for step in shown.recording if "O[0:8]" in step.changed))
    marked = page.locator("#changed td[title]").evaluate_all(
        "cells => cells.map(cell => cell.classList.contains('wrong'))"
    )
    assert marked == differs.ravel().tolist()


# --- in any place ---------------------------------------------------------------------------------


OUTSIDE = """[...document.querySelectorAll("button, input, select, h1, h2, p, canvas, .line")]
  .filter((x) => x.offsetParent && !x.closest(".scroll"))
  .map((x) => [x.getBoundingClientRect(), x.outerHTML.slice(0, 60)])
  .filter(([box]) => box.left < 0 || box.right > innerWidth)
  .map(([, what]) => what)"""


@pytest.mark.parametrize(
    "which",
    [("flash2", True), ("standard", False), ("fault", False)],
    ids=["backward", "standard", "fault"],
)
def test_nothing_is_cut_off_at_any_width(opened, views, which):
    page, last = opened(views[which].html()), len(views[which].recording) - 1
    for width, height in PHONE, NOTEBOOK, WIDE:
        page.set_viewport_size({"width": width, "height": height})
        for step in 0, last // 2, last:
            go(page, step)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("$('source').scrollWidth <= $('source').clientWidth")
            assert page.evaluate(OUTSIDE) == []


def test_the_followed_row_is_told_on_two_lines_a_turn_where_one_has_no_room(opened, forward):
    page, run, row = opened(forward.html(), PHONE), forward.recording, 9
    page.fill("#followed", str(row))
    page.press("#followed", "Enter")
    go(page, len(run) - 1)
    # Functions: the page forbids `eval`, which the second look at an expression would need.
    one_line = "() => document.querySelector('.two-lines') === null"
    two_lines = "() => document.querySelector('.two-lines') !== null"
    assert page.evaluate(two_lines)
    first, second = (page.locator("#turns tbody tr").nth(n) for n in (4, 5))
    keys = run[[step.changed.get("j") for step in run].index(slice(4, 8))].locals["j"]
    step = [s for s in run if "Oi" in s.changed and s.locals.get("j") == keys][row // 4]
    assert step.code.startswith("Oi[:] = ")
    found = [number(text) for text in first.locator("td").all_inner_texts()]
    old, new = (step.locals[name][row % 4] for name in ("mi", "m_new"))
    state = old, new, np.exp(old - new), step.locals["li"][row % 4]
    assert first.locator("th").inner_text().split() == ["keys", "4:8"]
    assert found == pytest.approx(state, rel=1e-3)
    name, numbers = second.inner_text().split("far ")
    assert name == "O so "
    wanted = step.locals["Oi"][row % 4]
    assert [number(text) for text in numbers.split()] == pytest.approx(wanted, rel=6e-3)
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.wait_for_function(one_line)
    go(page, step.number)
    assert page.locator("#turns .new-value").count() == 1
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.wait_for_function(two_lines)
    assert page.locator("#turns .below .new-value").count() == 1


@pytest.mark.parametrize("size", [NOTEBOOK, WIDE], ids=["notebook", "wide"])
def test_the_followed_row_is_in_sight_from_its_first_turn_to_its_last(opened, forward, size):
    page = opened(forward.html(), size)
    go(page, len(forward.recording) - 1)
    box = page.locator("#row").bounding_box()
    assert box["y"] + box["height"] <= size[1]


BOXES = """places => places.flatMap((place) => [...document.querySelectorAll(place)])
  .map((x) => x.getBoundingClientRect()).map((box) => [box.top, box.bottom])"""


@pytest.mark.parametrize("height", [800, 860])
def test_in_a_notebook_the_line_its_values_and_the_followed_row_are_in_sight(
    opened, forward, height
):
    page = opened(forward.html(), (860, height))
    for step in range(20, 32):  # a turn; the row that is followed is in it
        go(page, step)
        for top, bottom in page.evaluate(BOXES, [".line.on", "#turns tr.mine", "#changed"]):
            assert 0 < top < bottom <= height


@pytest.mark.parametrize("which", ["flash1", "standard", "flash2"])
def test_in_a_notebook_the_values_of_a_backward_pass_are_in_sight_too(opened, views, which):
    page = opened(views[which, True].html(), (860, 860))
    seen = set()
    for step in views[which, True].recording:
        if step.line not in seen:  # once each
            seen.add(step.line)
            go(page, step.number)
            first = "#changed > :first-child"  # of a long array eight rows
            boxes = page.evaluate(BOXES, [f"{first} tr"])[:9] or page.evaluate(BOXES, [first])
            for top, bottom in boxes:
                assert 0 < top < bottom <= 860


def test_on_a_phone_the_controls_stay_in_reach_and_are_large(opened, forward):
    page = opened(forward.html(), PHONE, has_touch=True)
    page.mouse.wheel(0, 900)
    for name in "back", "play", "forward":
        box = page.locator(f"#{name}").bounding_box()
        assert box["y"] + box["height"] <= PHONE[1]
        assert min(box["width"], box["height"]) >= 44


def test_pages_in_one_notebook_do_not_meet(opened, views):
    frames = [views["flash2", back]._repr_html_() for back in (False, True)]
    page = opened(f"<!doctype html><title>two</title>{frames[0]}{frames[1]}")
    first, second = page.frames[1:]
    first.wait_for_function("() => document.getElementById('position').textContent")
    second.wait_for_function("() => document.getElementById('position').textContent")
    first.click("#forward")
    first.click("#forward")
    second.click("#forward")
    assert (position(first), position(second)) == (2, 1)
    page.keyboard.press("End")  # goes to where the focus is
    assert (position(first), position(second)) == (2, len(views["flash2", True].recording) - 1)
    assert first.inner_text("h1") == "FlashAttention-2, forward"
    assert second.inner_text("h1") == "FlashAttention-2, backward"


CONTRASTS = """() => {
  const luminance = (rgb) => rgb.map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => { // as they lie on one another
    paper.clearRect(0, 0, 1, 1);
    for (const colour of colours) (paper.fillStyle = colour), paper.fillRect(0, 0, 1, 1);
    return [...paper.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const found = [];
  for (const x of document.querySelectorAll("body *")) {
    const own = [...x.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !x.offsetParent || x.closest("script, option")) continue;
    const behind = [];
    for (let y = x; y; y = y.parentElement) behind.unshift(getComputedStyle(y).backgroundColor);
    const [a, b] = [over([...behind, getComputedStyle(x).color]), over(behind)].map(luminance);
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), x.outerHTML.slice(0, 60)]);
  }
  return found;
}"""


def test_every_text_has_contrast(opened, views):
    """4.5 to 1, WCAG 2.2's criterion 1.4.3."""
    for shown in views["flash2", True], views["fault", False]:
        page = opened(shown.html())
        page.click("summary")
        for scheme in "light", "dark":
            page.emulate_media(color_scheme=scheme)
            for step in 5, 20:
                go(page, step)
                contrasts = page.evaluate(CONTRASTS)
                assert len(contrasts) > 50
                assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []


def test_dark_and_light_follow_the_system_and_redraw_the_map(opened, forward):
    page = opened(forward.html(), color_scheme="light")
    go(page, 30)
    drawn, seen = "document.querySelector('canvas').toDataURL()", []
    for scheme in "light", "dark", "light":
        page.emulate_media(color_scheme=scheme)
        if seen:  # it is told in an event of its own
            page.wait_for_function(f"(before) => {drawn} !== before", arg=seen[-1])
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(map(int, re.findall(r"\d+", colour)))
        assert bright > 600 if scheme == "light" else bright < 150
        seen.append(page.evaluate(drawn))
    assert seen[0] == seen[2] != seen[1]


FOCUS = """(() => {
  const x = document.activeElement, style = getComputedStyle(x);
  return [x.id || x.tagName, style.outlineStyle, parseFloat(style.outlineWidth)];
})()"""


def test_every_control_has_a_name_a_role_and_a_place_in_the_tab_order(opened, forward):
    page = opened(forward.html())
    tree = page.locator("body").aria_snapshot()
    for line in (
        'heading "FlashAttention-2, forward"', 'group "Playback"', 'button "Step back"',
        'button "Play"', 'button "Step"', 'slider "Step number"', 'combobox "Speed"',
        'spinbutton "Query row to follow"', 'img "On chip: 0 of 88 elements"',
        'heading "Changed by this step"', 'columnheader "m_new"', 'rowheader "keys 0:4"',
    ):  # fmt: skip
        assert line in tree
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        name, style, width = page.evaluate(FOCUS)
        reached.append(name)
        assert style != "none"
        assert width >= 2
    assert reached == [
        "SUMMARY", "back", "play", "forward", "slider", "speed", "source", "followed", "turns",
    ]  # fmt: skip
    ids = page.eval_on_selector_all("[id]", "all => all.map((x) => x.id)")
    assert len(ids) == len(set(ids))


def spoken(page):
    """What assistive technology is given: (role, name, properties) of each node, by Chromium."""
    client = page.context.new_cdp_session(page)
    nodes = client.send("Accessibility.getFullAXTree")["nodes"]
    return [
        (
            node["role"]["value"],
            node.get("name", {}).get("value", ""),
            {x["name"]: x["value"].get("value") for x in node.get("properties", ())},
        )
        for node in nodes
        if not node["ignored"]
    ]


CONTROLS = {"button", "slider", "combobox", "spinbutton", "DisclosureTriangle"}


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("which", [("standard", True), ("fault", False)], ids=["most", "fault"])
def test_what_can_be_focused_or_seen_has_a_role_and_a_name(opened, views, which, size):
    page, last = opened(views[which].html(), size), len(views[which].recording) - 1
    for step in 0, last // 2, last:
        go(page, step)
        tree = spoken(page)
        assert {role for role, _, _ in tree} >= CONTROLS
        assert "image" in {role for role, _, _ in tree}
        for role, name, properties in tree:
            if role in CONTROLS | {"image", "heading", "region"} or properties.get("focusable"):
                assert role not in ("generic", "none"), name
                assert name.strip(), role
        regions = [name for role, name, _ in tree if role == "region"]
        assert len(regions) == len(set(regions)) == 4


def test_a_step_is_announced_in_words(opened, forward):
    page = opened(forward.html())
    step = next(s for s in forward.recording[20:] if s.code.startswith("for j") and s.changed)
    go(page, step.number)
    said = page.text_content("#did")
    rows = step.locals["j"]
    region = f"[{rows.start}:{rows.stop}]"
    assert said == (
        f"Step {step.number}, line {step.line}: {step.code}  # load K_j, V_j. "
        f"Reads K{region}, V{region}, 32 elements. Evicts K, V, Sij. Changes j, Kj, Vj."
    )
    live = [x for x in spoken(page) if x[2].get("live") == "polite" and x[2].get("atomic")]
    assert live


def in_words(label):
    """{row: times} that the map's text says."""
    times = {"never": 0, "once": 1, "twice": 2}
    found = {}
    for first, last, often in re.findall(
        r"rows? (\d+)(?: to (\d+))? (never|once|twice|\d+ t)", label
    ):
        many = times[often] if often in times else int(often.split()[0])
        rows = range(int(first), int(last or first) + 1)
        assert not found.keys() & set(rows)
        found |= dict.fromkeys(rows, many)
    return found


@pytest.mark.parametrize("which", ["flash2", "standard"])
def test_the_map_says_in_words_how_often_each_row_was_read_and_written(opened, views, which):
    shown = views[which, False]
    run, page = shown.recording, opened(shown.html())
    loads = next(s.number for s in run[30:] if "read" in [e.kind for e in s.events])
    stores = next(s.number for s in run[30:] if "write" in [e.kind for e in s.events])
    for n in 0, loads, stores, len(run) - 1:
        go(page, n)
        counts = {}
        for step in run[: n + 1]:
            for e in step.events:
                if e.kind in ("read", "write"):
                    spans = [slice(*map(int, part.split(":"))) for part in e.where.split(", ")]
                    seen = counts.setdefault((e.name, e.kind), np.zeros(run.hbm[e.name], int))
                    seen[tuple(spans)] += 1
        labels = page.eval_on_selector_all("#maps canvas", "all => all.map((x) => x.ariaLabel)")
        assert len(labels) >= 5
        for label in labels:
            name, kind = re.match(r"(\w+), (read|writ)", label).groups()
            kind = "write" if kind == "writ" else kind
            seen = counts.get((name, kind), np.zeros(run.hbm[name], int))
            most = seen.reshape(len(seen), -1).max(axis=1)
            assert in_words(label) == dict(enumerate(most.tolist()))
            now = [e.where for e in run[n].events if (e.name, e.kind) == (name, kind)]
            rows = [slice(*map(int, where.split(",")[0].split(":"))) for where in now]
            told = [f"in this step rows {i.start} to {i.stop - 1}" for i in rows]
            assert label.split("; ")[1:] == told


def test_a_map_of_many_stripes_is_told_in_short(opened):
    shown = view(
        "block_sparse", N=40, tiles=(2, 2), block_mask=np.arange(400).reshape(20, 20) % 3 == 0
    )
    page = opened(shown.html())
    go(page, len(shown.recording) // 2)
    labels = page.eval_on_selector_all("#maps canvas", "all => all.map((x) => x.ariaLabel)")
    assert any("and so on, at most" in label for label in labels)
    assert max(map(len, labels)) < 300


def test_nothing_moves_by_itself(opened, forward):
    page = opened(forward.html(), reduced_motion="reduce")
    go(page, 30)
    assert page.evaluate("document.getAnimations().length") == 0
    page.wait_for_timeout(300)
    assert position(page) == 30


def test_without_memory_there_is_source_and_values(opened):
    page = opened(View(record(doubled, np.arange(3.0))).html())
    assert not page.is_visible("#memory")
    assert not page.is_visible("#row")
    assert page.locator("#changed td").all_inner_texts() == ["0", "2", "4"]


def doubled(x):
    x *= 2
    return x
