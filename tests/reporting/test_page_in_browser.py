"""The page in a browser: it loads from a file, answers clicks, keys and pointers, fits a phone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from fedlens.reporting.page.html import TABS, page
from fedlens.reporting.study.content import Check, Content
from tests.reporting.contents import HERE, THERE, cell, minimal, rich

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = which("chromium") or which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run",
)  # fmt: skip
PHONE, DESK = 400, 1280
RED = "rgb(176, 0, 32)"
WIDEST = """(async () => {  // of all tabs, once their charts are drawn; the last stays open
    const widths = [];
    for (const tab of document.querySelectorAll("[role=tab]")) {
        tab.click();
        for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
        widths.push(document.documentElement.scrollWidth);
    }
    return Math.max(...widths);
})()"""
BROKEN = replace(rich(), audit=[Check("Choices", "3 runs", ["run x: it was chosen on test"], [])])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a content's page; afterwards nothing was said to the console or asked of anyone."""
    said: list[str] = []
    pages = []

    def open_page(content: Content, *, width: int = DESK, scheme: str = "light") -> Any:
        place = tmp_path / f"page{len(pages)}.html"
        place.write_text(page(content), encoding="utf-8")
        sheet = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        sheet.set_default_timeout(30_000)
        sheet.on("console", lambda message: said.append(message.text))
        sheet.on("pageerror", lambda error: said.append(str(error)))
        sheet.on(
            "request", lambda sent: said.append(sent.url) if sent.url != place.as_uri() else None
        )
        pages.append(sheet)
        sheet.goto(place.as_uri())
        return sheet

    yield open_page
    for sheet in pages:
        sheet.close()
    assert [told for told in said if not told.startswith("data:")] == []


def shown_panels(sheet: Any) -> list[str]:
    return [id_ for id_ in TABS if sheet.locator(f"#panel-{id_}").is_visible()]


def chart(sheet: Any, kind: str = "curves") -> Any:
    return sheet.locator(f"[data-draw={kind}]").first


def point(figure: Any, share: float) -> None:
    """Moves the pointer into the plot, so far from its left."""
    plot = figure.locator(".plot")
    plot.hover(position={"x": plot.bounding_box()["width"] * share, "y": 60})


def test_tabs_work_by_click_key_and_address(opened: Any) -> None:
    sheet = opened(rich())
    assert shown_panels(sheet) == ["overview"]
    for id_ in TABS:
        sheet.click(f"#tab-{id_}")
        assert shown_panels(sheet) == [id_]
        assert sheet.get_attribute(f"#tab-{id_}", "aria-selected") == "true"
        assert sheet.locator("[role=tab][aria-selected=true]").count() == 1
    for key, id_ in [("ArrowRight", "overview"), ("ArrowLeft", "runs"), ("Home", "overview"),
                     ("End", "runs"), ("ArrowLeft", "audit")]:  # fmt: skip
        sheet.keyboard.press(key)
        assert shown_panels(sheet) == [id_]
        assert sheet.evaluate("document.activeElement.id") == f"tab-{id_}"
    sheet.evaluate("location.hash = 'table-mask_rules'")
    sheet.locator("#table-mask_rules").wait_for(state="visible")
    assert shown_panels(sheet) == ["comparisons"]
    sheet.go_back()
    sheet.locator("#panel-audit").wait_for(state="visible")


def test_toggles_hide_and_show_curves(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-curves")
    plot = chart(sheet)
    names = lambda: [g.get_attribute("data-curve") for g in plot.locator("g.series").all()]  # noqa: E731
    everything = names()
    assert len(everything) == 6
    legend = plot.get_by_role("button", name="random, IID")
    legend.click()
    assert legend.get_attribute("aria-pressed") == "false"
    assert names() == [name for name in everything if name != "random, IID"]
    plot.get_by_role("button", name="none", exact=True).click()
    assert names() == []
    assert "No curve is shown" in plot.inner_text()
    plot.get_by_role("button", name="IID", exact=True).click()
    assert names() == ["dense, IID", "least sensitive, IID", "random, IID"]
    plot.get_by_role("button", name="all", exact=True).click()
    assert names() == everything


def test_curves_can_be_told_apart_without_colour(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-curves")
    looks = chart(sheet).locator("g.series").evaluate_all(
        """groups => groups.map(g => g.querySelector('.line').getAttribute('stroke-dasharray')
             + g.querySelector('.marker').getAttribute('d'))"""
    )  # fmt: skip
    assert len(set(looks)) == 6


def test_pointing_reads_the_values_of_every_curve_shown(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-curves")
    plot = chart(sheet)
    point(plot, 0.55)
    assert plot.locator(".reading").inner_text() == "rounds: 4"
    assert plot.locator(".curve .value").all_inner_texts() == [
        f"{45 + place}.00 ± 0.50" for place in range(6)
    ]
    plot.get_by_role("button", name="random, Nc=1").click()
    point(plot, 0.97)
    assert plot.locator(".reading").inner_text() == "rounds: 8"
    assert plot.locator(".curve .value").all_inner_texts()[-2:] == ["54.00 ± 0.50", ""]
    plot.locator(".plot").focus()
    sheet.keyboard.press("ArrowLeft")
    assert plot.locator(".reading").inner_text() == "rounds: 4"


def test_the_axis_switches_between_rounds_steps_and_megabytes(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-curves")
    plot = chart(sheet)
    for name, last in [("local steps", "64"), ("megabytes sent", "3"), ("rounds", "8")]:
        plot.get_by_role("button", name=name).click()
        point(plot, 0.97)
        assert plot.locator(".reading").inner_text() == f"{name}: {last}"
    central = sheet.locator("[data-draw=curves]").nth(1)
    sheet.select_option("[data-choose=curves-0]", "1")
    offered = central.get_by_role("group", name="x axis").get_by_role("button")
    assert offered.all_inner_texts() == ["epochs", "local steps"]  # nothing is sent


def test_what_is_observed_of_clients_can_be_switched(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-clients")
    plot = chart(sheet, "observed")
    plot.get_by_role("button", name="sign agreement").click()
    point(plot, 0.97)
    assert plot.locator(".curve .value").all_inner_texts() == ["0.700", "0.700"]


def test_the_setting_switches_everywhere(opened: Any) -> None:
    sheet = opened(rich())
    assert sheet.locator("#panel-overview h3:visible").all_inner_texts() == [HERE]
    sheet.select_option("#setting", label=THERE)
    assert sheet.locator("#panel-overview h3:visible").all_inner_texts() == [THERE]
    sheet.click("#tab-comparisons")
    assert sheet.locator("#panel-comparisons h4:visible").all_inner_texts() == ["Central baselines"]


def test_a_number_tells_its_method_and_runs(opened: Any) -> None:
    sheet = opened(rich())
    sheet.locator(".number:visible", has_text="54.03").click()
    told = sheet.locator("[data-about=six_models]").inner_text()
    for part in ("FedAvg, IID, sparse: 54.03 ± 0.42", "ridge head frozen", "learning rate 0.01",
                 "chosen among 3 on validation", "30.2 MB sent", "sparse_iid_s2_abc2"):  # fmt: skip
        assert part in told


@pytest.mark.parametrize(
    ("mean", "half"),
    [(50.23, 12.32502), (50.04499999999999, 0.125), (48.375, 0.875), (50.045, 1.005)],
)
def test_a_chart_prints_the_digits_of_its_table(opened: Any, mean: float, half: float) -> None:
    """However near a half its number is, or at one."""
    content = rich()
    headline = content.chapters[0].headline
    assert headline
    cells = [[cell(mean, [0, 1], half), cell(50.0, [0, 1], untrained=1)], *headline.cells[1:]]
    told = replace(content.chapters[0], headline=replace(headline, cells=cells))
    sheet = opened(replace(content, chapters=[told]))
    said = f"{mean:.2f} ± {half:.2f}"
    drawn = sheet.locator("#panel-overview [data-draw=dots] .value").all_text_contents()
    assert said in drawn
    assert "50.00 ± 0.42 †" in drawn
    assert sheet.locator("#panel-overview .number .value").first.inner_text() == said
    sheet.locator("#panel-overview .number").nth(0).click()
    assert said in sheet.locator("[data-about=six_models]").inner_text()


def test_choosers_show_one_of_several(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-masks")
    assert sheet.locator("#panel-masks .choice:visible").count() == 3
    sheet.select_option("[data-choose=masks-0]", "2")
    assert sheet.locator("#panel-masks .choice:visible h4").all_inner_texts() == [
        "random, density 0.1"
    ]


def test_runs_are_filtered_and_commands_copied(opened: Any) -> None:
    sheet = opened(rich())
    sheet.click("#tab-runs")
    sheet.fill("#filter", "SPARSE seed=1")
    assert sheet.locator(".made:visible h3").all_inner_texts() == ["sparse_iid_s1_abc1"]
    assert sheet.inner_text("#filtered") == "1 of 3 runs"
    button = sheet.locator(".copy:visible")
    for allowed, told in [("true", "copied"), ("false", "selected")]:
        sheet.evaluate(
            f"""void (navigator.clipboard.writeText = async (text) => {{
                if (!{allowed}) throw new Error("not allowed");
                window.kept = text;
            }})"""
        )
        button.click()
        playwright.expect(button).to_have_text(told)
    command = "fedlens run sparse_iid_s1_abc1 seed=1"
    assert sheet.evaluate("[window.kept, String(getSelection())]") == [command, command]


def test_charts_have_names_and_tables_behind_them(opened: Any) -> None:
    sheet = opened(rich())
    names = """[...document.querySelectorAll('svg[role=img]')].map(picture =>
        ['title', 'desc'].map(part => picture.querySelector(part).textContent))"""
    named = sheet.evaluate(names)
    assert len(named) > 5
    assert all(title and description for title, description in named)
    dots = sheet.locator(".dots[role=img]").evaluate_all(
        "charts => charts.map(chart => chart.getAttribute('aria-label'))"
    )
    assert len(dots) > 10
    assert all(": " in label for label in dots)
    sheet.click("#tab-curves")
    chart(sheet).locator("summary").click()
    chart(sheet).locator("tbody tr").first.wait_for()
    rows = chart(sheet).locator("tbody tr").all_inner_texts()
    assert len(rows) == 18
    assert rows[1].split("\t") == ["dense, IID", "4", "32", "1.5", "45.00 ± 0.50"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_on_a_phone(opened: Any, scheme: str) -> None:
    long = "a_run_with_a_name_that_has_no_end_" * 8
    faults = [Check(long, long, [long], [long])]
    content = rich()
    first = replace(content.chapters[0], setting=f"{HERE}, {long}")
    about = replace(content.about, title=long)
    wide = replace(content, about=about, chapters=[first, content.chapters[1]], audit=faults)
    sheet = opened(wide, width=PHONE, scheme=scheme)
    assert sheet.evaluate(WIDEST) <= PHONE
    sheet.click("#tab-overview")
    sheet.select_option("#setting", "1")
    assert sheet.evaluate(WIDEST) <= PHONE
    background = sheet.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(247, 247, 245)", "dark": "rgb(17, 20, 23)"}[scheme]


def test_tabs_off_screen_are_hinted_at(opened: Any) -> None:
    sheet = opened(rich(), width=PHONE)
    bar = sheet.locator("[role=tablist]")
    playwright.expect(bar).to_have_class("more-right")
    bar.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    playwright.expect(bar).to_have_class("more-left")
    wide = opened(rich()).locator("[role=tablist]")
    assert not wide.get_attribute("class")


@pytest.mark.parametrize("width", [PHONE, 800, 1400])
def test_labels_and_numbers_of_a_dot_chart_stand_beside_its_plot(opened: Any, width: int) -> None:
    sheet = opened(rich(), width=width)
    overlaps = sheet.evaluate(
        """[...document.querySelectorAll("#panel-overview .dots")].flatMap((chart) => {
            const boxes = (selector) => [...chart.querySelectorAll(selector)]
                .map((node) => node.getBoundingClientRect()).filter((box) => box.width);
            const meet = (a, b, from, to) => a[from] < b[to] - 1 && b[from] < a[to] - 1;
            const labels = boxes(".name, .where, .value");
            return boxes(".strip").flatMap((plot) => labels.filter((label) =>
                meet(plot, label, "left", "right") && meet(plot, label, "top", "bottom")));
        }).length"""
    )  # fmt: skip
    assert overlaps == 0


def test_a_violation_is_red_and_marks_its_tab(opened: Any) -> None:
    sheet = opened(BROKEN)
    colour = "node => getComputedStyle(node).color"
    tab = sheet.locator("#tab-audit")
    assert "1 violation" in tab.inner_text()
    assert tab.evaluate(colour) == RED
    tab.click()
    fault = sheet.locator("#panel-audit li", has_text="it was chosen on test")
    assert fault.is_visible()
    assert fault.evaluate(colour) == RED
    assert "FAIL" in sheet.inner_text("#panel-audit h3")


def test_a_report_of_one_run_opens_without_a_word(opened: Any) -> None:
    sheet = opened(minimal(), width=PHONE)
    assert sheet.evaluate(WIDEST) <= PHONE
    assert shown_panels(sheet) == [list(TABS)[-1]]
    assert sheet.locator("#setting").count() == 0


def test_print_shows_every_part(opened: Any) -> None:
    sheet = opened(rich(), scheme="dark")
    sheet.emulate_media(media="print")
    assert shown_panels(sheet) == list(TABS)
    assert sheet.locator("[data-setting='1']:visible").count() == 6
    assert (
        sheet.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')")
        == "#000"
    )
