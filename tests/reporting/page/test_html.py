"""The page as text: whole, safe, the same every time, and true to the content."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from fedlens.reporting.page.html import TABS, deepest, distinct, page, share, summary
from fedlens.reporting.study.captions import verdict
from fedlens.reporting.study.content import (
    Answer,
    Author,
    Cell,
    Check,
    Contrast,
    Curve,
    CurveSet,
    Grid,
)
from fedlens.reporting.study.questions import questions
from tests.reporting.contents import ABOUT, cell, mask, minimal, rich

NASTY = "<script>alert(1)</script>"


def data(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found.group(1))


def words(text: str) -> str:
    """What a reader sees, without tags, style and scripts."""
    kept = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", kept)).split())


class Tree(HTMLParser):
    """Counts what must balance, and keeps every id and reference."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.asked: list[str] = []
        self.levels: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.asked += [told[key] or "" for key in ("src", "href") if key in told]
        self.scripts += tag == "script"
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tree(text: str) -> Tree:
    parsed = Tree()
    parsed.feed(text)
    parsed.close()
    return parsed


@pytest.mark.parametrize("content", [rich(), minimal()], ids=["rich", "minimal"])
def test_the_page_is_whole_and_asks_for_nothing(content: Any) -> None:
    parsed = tree(page(content))
    assert not parsed.open
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.scripts == 2
    assert all(asked == "data:," or asked.startswith("#") for asked in parsed.asked)
    names = {asked[1:] for asked in parsed.asked if asked.startswith("#")}
    assert names <= set(parsed.ids) | set(TABS)


def test_headings_never_skip_a_level() -> None:
    levels = tree(page(rich())).levels
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(next_ - level <= 1 for level, next_ in pairwise(levels))


def test_the_same_content_gives_the_same_bytes() -> None:
    assert page(rich()) == page(rich())


def test_whatever_is_told_is_text() -> None:
    """Every string of the content replaced by markup adds no element and ends none."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, str):
            return value + NASTY
        if isinstance(value, list | tuple):
            return type(value)(spoilt(held) for held in value)
        return value

    content = rich()
    chapter = content.chapters[0]
    grid = replace(
        chapter.grids[0], **{k: spoilt(getattr(chapter.grids[0], k)) for k in ("title", "note")}
    )
    bad = replace(
        content,
        about=replace(ABOUT, title=NASTY, abstract=NASTY, authors=[Author(NASTY, NASTY, NASTY)]),
        chapters=[
            replace(
                chapter,
                setting=NASTY,
                grids=[grid, *chapter.grids[1:]],
                masks=[replace(m, label=NASTY, run=NASTY) for m in chapter.masks],
                findings=[replace(f, facts=[(NASTY, NASTY)]) for f in chapter.findings],
                facts={NASTY: [NASTY]},
            ),
            *content.chapters[1:],
        ],
        audit=[Check(NASTY, NASTY, [NASTY], [NASTY])],
        runs=[
            replace(run, name=NASTY, command=NASTY, versions={NASTY: NASTY}) for run in content.runs
        ],
        unfinished={NASTY: NASTY},
    )
    text = page(bad)
    assert NASTY not in text
    assert tree(text).scripts == 2
    assert data(text)[0]["setting"] == NASTY


def test_the_data_hold_numbers_as_json_knows_them() -> None:
    content = rich()
    chapter = content.chapters[0]
    odd = replace(chapter.alphas[0], loss=[float("nan"), float("inf"), 1.2345678901234567])
    told = data(page(replace(content, chapters=[replace(chapter, alphas=[odd])])))
    assert told[0]["alphas"][0]["loss"] == [None, None, 1.2345678901234567]


def test_one_seed_is_labelled_and_has_no_interval() -> None:
    shown = words(page(rich()))
    assert "78.74 1 seed" in shown
    assert "54.69 ± 0.42 3 seeds · 307 MB" in shown
    assert "78.74 ±" not in shown


@pytest.mark.parametrize(
    ("mean", "count", "corrected", "said"),
    [
        (-1.5, 3, 0.03, "lower"),
        (1.5, 3, 0.0499, "higher"),
        (-1.5, 3, 0.05, "not significant"),
        (-1.5, 3, None, "not significant"),
        (-1.5, 2, 0.0001, "too few seeds to test"),
        (-9.0, 1, None, "too few seeds to test"),
    ],
)
def test_a_difference_is_significant_below_five_percent_with_three_seeds_or_more(
    mean: float, count: int, corrected: float | None, said: str
) -> None:
    half = 0.5 if count > 1 else None
    told = Contrast("a", "b", "c", mean, half, count, corrected, corrected)
    assert verdict(told) == said


def test_differences_are_shown_with_sign_interval_and_verdict() -> None:
    shown = words(page(rich()))
    assert "least sensitive dense IID −1.18 ± 0.62 3 0.056 not significant" in shown
    assert "random dense IID −0.66 ± 0.04 3 < 0.001 lower" in shown
    assert "Nc=1 IID −39.56 1 – too few seeds to test" in shown


def test_a_number_of_untrained_models_says_so_where_it_stands() -> None:
    content = rich()
    headline = content.chapters[0].headline
    assert headline
    first: list[Cell | None] = [cell(40.0, [0, 1], untrained=1), cell(41.0, [0, 1])]
    cells = [first, *headline.cells[1:]]
    told = replace(content.chapters[0], headline=replace(headline, cells=cells))
    changed = replace(content, chapters=[told])
    said = "best before training in 1 of 2 seeds"
    assert f"40.00 ± 0.42 2 seeds · 307 MB † {said} 41.00" in words(page(changed))
    assert f"40.00 ± 0.42 % for central ({said})" in words(page(changed))
    assert said not in words(page(content))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ((1, 1), "were not tuned in these runs: each method was run with one value."),
        ((1, 4), "In 1 of 2 trained cells of the tables the method, with its learning rate and "
                 "weight decay, was chosen among several on validation, never on test accuracy; in "
                 "the others each method was run with one value."),
        ((2, 4), "chosen among several on validation, never on test accuracy. P-values are"),
    ],
)  # fmt: skip
def test_a_choice_is_told_only_where_there_was_one(candidates: tuple[int, int], said: str) -> None:
    row = [cell(50.0, [0], candidates=count) for count in candidates]
    table = Grid("a", "heads", "Heads", "", "", ["a"], ["IID", "Nc=1"], [[*row]])
    content = replace(minimal(), chapters=[replace(minimal().chapters[0], grids=[table])])
    assert said in words(page(content))


def test_megabytes_say_what_was_sent_before_the_first_round() -> None:
    assert "Sizes are what one run sends in both directions. " in words(page(rich()))
    content = rich()
    early = [
        Curve(str(sent), [], [0, 2], [0, 8], [sent, 20.0], [40.0, 41.0], [None, None])
        for sent in (15.1544, 7.5)
    ]
    curves = [CurveSet("six_models", "six_models", "Six", "round", early, [])]
    told = replace(content, chapters=[replace(content.chapters[0], curves=curves)])
    said = (
        "in both directions in all rounds, and 7.50 to 15.15 MB that clients send before the first "
        "round, for the head or the mask."
    )
    assert said in words(page(told))


def test_an_analysis_is_told_with_its_ties_its_pair_and_chance() -> None:
    content = rich()
    here = content.chapters[0]
    assert "tied with" not in words(page(content))
    tied = replace(here.alphas[0], accuracy=[50.0, 50.0, 49.0])
    told = words(page(replace(content, chapters=[replace(here, alphas=[tied])])))
    assert "On validation it is tied with α = 0." in told
    assert "merged clients 3 and 8 sign conflict of 2 clients with random signs 50.00%" in told


def test_facts_are_named_in_words() -> None:
    facts: dict[str, list[Any]] = {
        "lr": [0.01],
        "l2": [1.0],
        "batch_size": [32],
        "schedule": ["cosine"],
    }
    content = replace(minimal(), chapters=[replace(minimal().chapters[0], facts=facts)])
    said = "learning rate 0.01 ridge λ 1.0 batch size 32 schedule cosine"
    assert said in words(page(content))


def test_the_summary_says_what_the_records_say() -> None:
    assert summary(rich()) == (
        "3 finished runs in 2 settings, seeds 0, 1; 1 unfinished run left out."
    )


def test_the_first_screen_answers_each_question_with_a_sentence_and_a_figure() -> None:
    text = page(rich())
    first = text[text.index('id="panel-overview"') : text.index('id="panel-curves"')]
    said = words(first)
    assert (
        "Which weights should be trained? Test accuracy at IID is 0.66 ± 0.04 points lower with "
        "random than with dense (significant: p < 0.001, 3 seeds). Of 2 tested differences from "
        "dense at IID, 1 is significant: this one." in said
    )
    assert "Nc=1 minus IID: −39.56 points (1 seed; too few seeds to test)." in said
    answers = first.count('class="answer"')
    assert answers == first.count('class="chart"') == 10 + 1 + 1  # tables, α, the other setting
    assert said.index("Which weights") < said.index("How far is federated")  # tested ones first


def test_the_contrasts_that_a_suite_states_come_first_and_are_quoted_alike() -> None:
    stated = Answer("Do masks cost accuracy?", "random", "dense", -0.66, 0.04, 3, -9.0, 0.001,
                    0.002, [["a"], ["b"]])  # fmt: skip
    later = replace(stated, question="what comes then", mean=None, half=None, count=0, p=None,
                    effect=None, corrected=None)  # fmt: skip
    text = page(replace(rich(), asked=[stated, later]))
    said = words(text)
    assert (
        "Do masks cost accuracy? Test accuracy is 0.66 ± 0.04 points lower with random than with "
        "dense (significant: p = 0.002, 3 seeds)." in said
    )
    assert "What comes then: There are no runs yet that compare random with dense." in said
    assert said.index("Do masks cost accuracy?") < said.index("Which weights should be trained?")
    assert "corrected by Holm's method over the 2 contrasts that the suite states" in said


def test_differences_without_a_test_are_folded() -> None:
    text = page(rich())
    folded = re.findall(r'<details class="more"( open)?><summary>([^<]*)</summary>', text)
    assert ("", "1 difference without a test (too few seeds to test)") in folded
    assert (" open", "2 tested differences") in folded


def test_the_audit_says_pass_fail_or_that_nothing_was_tuned() -> None:
    checks = [
        Check("Choices", "1 run", [], []),
        Check("Methods were tuned alike", "1 table", [], [], nothing="not tuned"),
    ]
    said = words(page(replace(rich(), audit=checks)))
    assert "✓ Audit: PASS." in said
    assert "PASS Choices" in said
    assert "not tuned Methods were tuned alike" in said
    bad = replace(checks[1], violations=["one was not"])
    assert "FAIL Methods were tuned alike" in words(page(replace(rich(), audit=[bad])))


def test_a_section_without_data_says_so_in_a_sentence() -> None:
    shown = words(page(minimal()))
    unanswered = [f"{one.label} ({one.suite})" for one in questions() if not one.headline]
    for sentence in (
        "No finished run of this setting is one of the six models",
        "There are no learning curves",
        "Questions without runs in this setting (run the suite in brackets to add them): "
        + "; ".join(unanswered)
        + ".",
        "There are no masks",
        "No α sweep was run",
        "No other analysis",
        "No run of this setting recorded drift",
        "There are no clients in this setting.",
        "All runs have finished.",
    ):
        assert sentence in shown


def test_violations_are_listed_in_full_and_mark_the_tab() -> None:
    faults = [f"run {number} was chosen on test" for number in range(40)]
    broken = replace(rich(), audit=[Check("Nothing was chosen", "1 run", faults, ["a remark"])])
    text = page(broken)
    assert all(f"<li>{fault}</li>" in text for fault in faults)
    assert re.search(r'id="tab-audit"[^>]*class="broken"', text)
    assert "✗ Audit: FAIL, 40 violations." in words(text)
    assert 'class="broken"' not in page(rich())


def test_every_run_has_its_command_and_its_hashes_whole() -> None:
    content = rich()
    text = page(content)
    for run in content.runs:
        assert f"<code>{run.command}</code>" in text
        assert run.commit in text
        assert run.parameters in text
    assert "unfinished_s0_1: stopped" in words(text)


def test_labels_that_repeat_are_told_apart() -> None:
    masks = [mask("random", "x_s0_aa"), mask("random", "x_s0_bb"), mask("dense", "x_s0_cc")]
    assert distinct(masks) == ["random (aa)", "random (bb)", "dense"]


def test_colours_are_shares_of_the_range() -> None:
    assert share(5, 0, 10) == "0.500"
    assert share(12, 0, 10) == "1.000"
    assert share(-1, 0, 10) == "0.000"
    assert share(3, 3, 3) == "0.000"
    assert deepest([mask("a", "r"), replace(mask("b", "r"), density=[[None, 0.9]])]) == 0.9


def test_text_has_enough_contrast_in_light_and_dark() -> None:
    """AA: 4.5 to 1 for all text on all it is written on."""
    style = files("fedlens.reporting").joinpath("page", "style.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    pairs = [
        (text, ground)
        for text in ("ink", "muted", "accent")
        for ground in ("ground", "surface", "soft")
    ]
    pairs += [
        (text, ground) for text in ("bad", "good", "warn") for ground in ("ground", "surface")
    ]
    pairs += [
        ("ink", "heat-high"),
        ("ink", "heat-minus"),
        ("bad", "bad-soft"),
        ("good", "good-soft"),
    ]
    pairs += [("accent", "bad-soft"), ("accent", "good-soft"), ("surface", "accent")]
    for colours in (light, {**light, **dark}):
        for text, ground in pairs:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours is light)


def contrast(first: str, second: str) -> float:
    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_cell_without_a_run_is_not_a_number() -> None:
    content = rich()
    headline = content.chapters[0].headline
    assert headline is not None
    assert headline.cells[0][1] is None
    assert "central 78.74 1 seed no run" in words(page(content))
    assert cell(1.0, [0]).half is None
