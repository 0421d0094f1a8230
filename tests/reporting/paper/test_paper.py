"""The paper: every number from the records, no claim beyond them, sound LaTeX, and few pages."""

import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from pylatexenc.latexwalker import LatexWalker

from fedlens.errors import FedlensError
from fedlens.reporting import paper
from fedlens.reporting.figures import report
from fedlens.reporting.paper import analyses, audit, differences, floats, prose
from fedlens.reporting.paper.own_texts import PLACES
from fedlens.reporting.paper.sections import SECTIONS
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import (
    About,
    AlphaCurve,
    Author,
    Cell,
    Check,
    Content,
    Contrast,
    CurveSet,
    Finding,
    Grid,
    Observation,
    PartitionPicture,
)
from fedlens.reporting.study.questions import questions
from tests.reporting.contents import ABOUT, HERE, cell, chapter, minimal, rich

NASTY = r"100% & $x_1$ #~^\{} <|> α λ × − σ ≥ é ł ß 中"
PAGES = 8
Cells = list[list[Cell | None]]
EMPTY = Content(About(), questions(), [], [], [], {})
needs_latexmk = pytest.mark.skipif(not shutil.which("latexmk"), reason="latexmk is not installed")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "wide.pdf"
    Figure(figsize=(7, 4)).savefig(path)
    return path


def written(content: Content, folder: Path, picture: Path | None = None) -> str:
    """report.tex, with the same picture for every drawing, or without any."""
    figures = folder / "figures"
    figures.mkdir(parents=True)
    if picture:
        for drawing in report.figures(content):
            shutil.copy(picture, figures / f"{drawing.name}.pdf")
    paper.write(content, folder, figures)
    return (folder / "report.tex").read_text(encoding="utf-8")


def nasty() -> Content:
    """Names that LaTeX would stumble over, wherever a user or a config can put them."""
    content = rich()
    here = content.chapters[0]
    assert here.headline
    grids = [
        replace(grid, title=f"{grid.title} {NASTY}", note=NASTY,
                rows=[f"{NASTY} {row}" for row in grid.rows],
                contrasts=[replace(c, row=f"{NASTY} {c.row}", against=f"{NASTY} {c.against}")
                           for c in grid.contrasts])
        for grid in here.grids
    ]  # fmt: skip
    findings = [replace(f, label=NASTY, facts=[(NASTY, NASTY)]) for f in here.findings]
    alphas = [replace(a, label=NASTY, base=NASTY) for a in here.alphas]
    chapters = [
        replace(here, setting=NASTY, grids=grids, findings=findings, alphas=alphas),
        *content.chapters[1:],
    ]
    long = "quickstart_sparse_synthetic_vit_pico-32px_ridge-full_least-sensitive-0.1_classes1_s0"
    audit = [Check(NASTY, NASTY, [NASTY, f"{long}: {long}"], [NASTY])]
    about = About(NASTY, [Author(NASTY, NASTY, NASTY)], NASTY, NASTY)
    return replace(content, about=about, chapters=chapters, audit=audit)


@cache
def overflowing() -> Content:
    """Settings, tables, rows, columns, analyses, people and violations by the dozen."""
    content = rich()
    here = content.chapters[0]
    three = [0, 1, 2]
    rows = [f"a method with quite a long name, number {n}" for n in range(14)]
    columns = [f"Dirichlet 0.{n}" for n in range(1, 11)]

    contrasts = [
        Contrast(row, against, column, (-1) ** n * 2.5, 0.75, 3, 0.01, (0.01, 0.01, 0.2)[n % 3])
        for against in rows[:2]
        for column in columns
        for n, row in enumerate(rows)
        if row != against
    ]
    cells: Cells = [[cell(50.0 + r, three) for _ in columns] for r, _ in enumerate(rows)]

    def large(grid: Grid, name: str) -> Grid:
        return replace(grid, name=name, rows=rows, columns=columns, cells=cells,
                       contrasts=contrasts, note=" ".join([grid.note] * 3))  # fmt: skip

    assert here.headline
    settings = []
    for place in range(5):
        grids = [large(g, f"{g.name}-{k}-{place}") for k in range(4) for g in here.grids]
        facts: dict[str, list[Any]] = {
            name: [float(n) for n in range(20)] for name in ("clients", "local_steps", "density")
        }
        told = [("edits", ", ".join(f"client {n} × 0" for n in range(60)))] * 5
        settings.append(
            replace(
                here,
                setting=f"a data set, a backbone of some size at {place} px",
                headline=replace(here.headline, name=f"six_models-{place}"),
                grids=grids,
                alphas=here.alphas * 5,
                findings=[replace(f, facts=told) for f in here.findings * 5],
                facts=facts,
            )
        )
    people = [Author(f"Person Number {n}", f"s{n}", f"University {n // 3}") for n in range(9)]
    checks = [Check(f"A check of some length {n}", "many things", ["a fault was found"] * 9, [])
              for n in range(9)]  # fmt: skip
    about = About("A study with everything in it", people, abstract="Many words. " * 60)
    return replace(content, about=about, chapters=settings, audit=checks)


# ---- numbers

COLUMNS = re.compile(r"\\begin\{tabular\}.*")
UNSAID = (
    re.compile(r"\\begin\{equation\}.*?\\end\{equation\}", re.S),
    re.compile(r"\\(?:cite|ref|label|multicolumn)\{[^}]*\}"),
    re.compile(r"\\includegraphics\[[^\]]*\]\{[^}]*\}"),
    re.compile(r"\\\\\[2pt\]"),
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def body(text: str) -> str:
    return text.partition(r"\begin{document}")[2].partition(r"\bibliographystyle")[0]


def numbers(text: str) -> list[str]:
    """All that the prose, the captions and the tables state; not those of the method's formulae."""
    text = COLUMNS.sub("", body(text))
    tables = re.findall(r"\\toprule.*?\\end\{tabular\}", text, re.S)
    for table in tables:  # here results stand in formulae
        text = text.replace(table, re.sub(r"\^\{[^}]*\}|\$", "", table))
    for pattern in UNSAID:
        text = pattern.sub("", text)
    text = re.sub(r"(?<!\\)\$[^$]*\$", "", text)
    return NUMBER.findall(text)


def held(value: Any) -> Iterator[str]:
    """The numbers in a content, as they may be printed; how many there are of something, too."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield f"{abs(value):g}"
        yield from (f"{abs(value):.{decimals}f}" for decimals in range(5))
    elif isinstance(value, str):
        yield from NUMBER.findall(value)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from (*held(key), *held(entry))
    else:
        yield str(len(value))
        for entry in value:
            yield from held(entry)


def counted(content: Content) -> Iterator[str]:
    """What can be counted in the records without being in them."""
    grids = [g for c in content.chapters for g in ([c.headline] if c.headline else []) + c.grids]
    cells = [one for grid in grids for row in grid.cells for one in row if one]
    yield str(len(cells))
    yield str(sum(len(one.seeds) < 3 for one in cells))
    yield str(sum(one.candidates > 1 for one in cells))
    yield str(len({run.seed for run in content.runs}))
    yield "0.001"  # a smaller p is printed as below it
    for finding in (f for c in content.chapters for f in c.findings if f.kind == "interference"):
        yield from held(100 * captions.chance(len(finding.record["clients"])))
        told = finding.record
        shares = [told["sign_conflict_of_all"], *told["accuracy_merged"], *told["accuracy_alone"]]
        yield from held([100 * share for share in shares])
    for grid in grids:
        yield str(sum(c.corrected is not None for c in grid.contrasts))
        yield str(sum(c.corrected is not None and c.corrected < 0.05 for c in grid.contrasts))


@pytest.mark.parametrize("content", [rich(), minimal()], ids=["rich", "minimal"])
def test_every_number_in_the_paper_is_one_that_the_records_hold(
    content: Content, tmp_path: Path
) -> None:
    stated = set(numbers(written(content, tmp_path)))
    assert stated
    assert stated <= {*held(asdict(content)), *counted(content)}


def test_other_records_leave_no_number_of_the_old_ones(tmp_path: Path) -> None:
    """All means are moved by 7.77: a number that stayed would be the template's own."""
    content = rich()

    def moved(grid: Grid) -> Grid:
        cells = [[one and replace(one, mean=one.mean + 7.77) for one in row] for row in grid.cells]
        return replace(grid, cells=cells)

    here = content.chapters[0]
    assert here.headline
    changed = replace(here, headline=moved(here.headline), grids=[moved(g) for g in here.grids])
    before = written(content, tmp_path / "a")
    after = written(replace(content, chapters=[changed, *content.chapters[1:]]), tmp_path / "b")
    assert {"54.69", "54.03", "52.00"} <= set(numbers(before)) - set(numbers(after))
    assert {"62.46", "61.80", "59.77"} <= set(numbers(after)) - set(numbers(before))


def test_the_template_itself_states_no_number(tmp_path: Path) -> None:
    assert set(numbers(written(EMPTY, tmp_path))) == {"0"}  # finished runs, settings and seeds
    template = files("fedlens.reporting.paper").joinpath("report.tex.j2").read_text("utf-8")
    words = re.sub(r"<[<%].*?[%>]>", "", template)
    widths = re.sub(r"p\{[^}]*\}", "", words)
    assert numbers(widths) == []


def test_a_table_of_many_rows_and_columns_is_cut_and_says_where_the_whole_is() -> None:
    rows, columns = [f"r{n}" for n in range(20)], [f"c{n}" for n in range(9)]
    cells: Cells = [[cell(50.0, [0, 1]) for _ in columns] for _ in rows]
    grid = Grid("large", "heads", "Large", "", "", rows, columns, cells)
    placed = floats.table(grid, HERE)
    assert placed.body.count(r" \\") == floats.ROWS + 1
    assert "r7" in placed.body
    assert "r8" not in placed.body
    assert "tables/large.csv" in placed.body


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (54.687, 2, "54.69"),
        (-0.32, 2, "$-$0.32"),
        (-0.001, 2, "0.00"),
        (0.0001, None, "0.0001"),
        (0.1, None, "0.1"),
        (0.0, None, "0"),
        (1e-05, None, "0.00001"),
        (100, None, "100"),
        (2000000, None, "2000000"),
        (100.0, None, "100"),
    ],
)
def test_numbers_are_printed_as_told(value: float, decimals: int | None, text: str) -> None:
    assert prose.number(value, decimals) == text


# ---- claims

LOSS = Contrast("random", "dense", "IID", -1.49, 0.5, 3, 0.006, 0.03)
GAIN = replace(LOSS, row="ridge", mean=2.25, corrected=0.0004)
OPEN = replace(LOSS, row="least sensitive", mean=-1.18, half=0.62, corrected=0.056)
SINGLE = replace(LOSS, row="lowest", mean=-0.32, half=None, count=1, p=None, corrected=None)


def compared(*contrasts: Contrast, columns: tuple[str, ...] = ("IID",)) -> Grid:
    rows = list(dict.fromkeys(["dense", *(c.row for c in contrasts)]))
    cells: Cells = [[cell(50.0, [0, 1, 2]) for _ in columns] for _ in rows]
    return Grid("a", "mask_rules", "Rules", "", "", rows, [*columns], cells, list(contrasts))


def test_a_difference_is_stated_only_if_its_corrected_p_decides_it() -> None:
    (said,) = differences.contrasts(compared(LOSS, GAIN, OPEN))
    assert said == (
        r"Compared with \emph{dense} (3 seeds), \emph{random} loses 1.49 $\pm$ 0.50 points "
        r"($p$ = 0.030); "
        r"\emph{ridge} gains 2.25 $\pm$ 0.50 points ($p$ = 0.0004); the difference is not "
        r"significant for \emph{least sensitive} ($-$1.18 $\pm$ 0.62)."
    )


def test_columns_within_a_row_are_told_apart_from_rows_within_a_column() -> None:
    steps = Contrast("J=16", "J=4", "Nc=1", -7.5, 1.25, 3, 0.001, 0.004, turned=True)
    skew = Contrast("Nc=1", "IID", "J=4", -8.5, 1.5, 3, 0.002, 0.004)
    cells: Cells = [[cell(50.0, [0, 1, 2]) for _ in range(2)] for _ in range(2)]
    grid = Grid("a", "local_steps", "L", "", "", ["IID", "Nc=1"], ["J=4", "J=16"], cells,
                [skew, steps])  # fmt: skip
    (straight,) = differences.contrasts(grid)
    assert straight.startswith(r"Compared with \emph{IID} at J=4 (3 seeds), \emph{Nc=1} loses 8.50")
    (turned,) = differences.contrasts(grid, turned=True)
    assert turned.startswith(r"Compared with \emph{J=4} at Nc=1 (3 seeds), \emph{J=16} loses 7.5")
    told = chapter(HERE, grids=[grid])
    assert turned in SECTIONS["steps"].sentences(told)
    assert straight in SECTIONS["heterogeneity"].sentences(told)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(-9, 9).filter(lambda mean: abs(mean) > 0.01))
def test_losses_and_gains_need_a_p_below_the_limit(p: float, mean: float) -> None:
    grid = compared(replace(LOSS, mean=mean, p=p, corrected=p))
    said = " ".join(differences.contrasts(grid))
    claimed = {word for word in ("loses", "gains") if f" {word} " in said}
    expected = {"loses" if mean < 0 else "gains"} if p < 0.05 else set()
    assert claimed == expected
    assert ("significant for" in said) == (p >= 0.05)


def test_a_p_below_the_limit_is_printed_below_it() -> None:
    assert differences.p_value(replace(LOSS, corrected=0.0499)) == "$p$ = 0.0499"
    assert differences.p_value(replace(LOSS, corrected=0.0301)) == "$p$ = 0.030"
    assert differences.p_value(replace(LOSS, corrected=0.00002)) == "$p$ = 0.00002"


def test_fewer_than_three_seeds_are_too_few_to_test() -> None:
    two = replace(LOSS, count=2, corrected=0.0001)
    for contrasts, seeds, values in (
        ([SINGLE], "1 seed", r"\emph{lowest} $-$0.32."),
        ([two], "2 seeds", r"\emph{random} $-$1.49 $\pm$ 0.50."),
        ([SINGLE, two], "1 to 2 seeds", r"\emph{random} $-$1.49 $\pm$ 0.50."),
    ):
        grid = compared(*contrasts)
        (said,) = differences.contrasts(grid)
        assert said.startswith(
            rf"Differences from \emph{{dense}} in points, over {seeds} (too few seeds to test): "
        )
        assert said.endswith(values)


def test_one_seed_is_told_where_its_number_stands() -> None:
    assert "(dense, 1 seed)" in prose.accuracies([("dense", cell(50.0, [4]))])


def test_of_a_pair_compared_both_ways_one_is_told() -> None:
    back = replace(LOSS, row="dense", against="random", mean=1.49)
    said = differences.contrasts(compared(LOSS, back))
    assert len(said) == 1


def test_of_many_columns_the_first_and_the_last_are_spoken_of() -> None:
    columns = ("J=4", "J=8", "J=16")
    grid = compared(*(replace(LOSS, column=c) for c in columns), columns=columns)
    said = " ".join(differences.contrasts(grid))
    assert "at J=4" in said
    assert "at J=16" in said
    assert "at J=8" not in said


def test_a_difference_in_any_setting_counts_in_the_conclusion(tmp_path: Path) -> None:
    settings = [chapter(name) for name in "abc"] + [chapter("d", grids=[compared(LOSS)])]
    said = written(Content(ABOUT, questions(), settings, [], [], {}), tmp_path)
    assert "so no difference was tested" not in said
    assert (
        r"(d)} Test accuracy is 1.49 $\pm$ 0.50 points lower with random than with dense "
        "(significant: p = 0.030, 3 seeds)." in said
    )


def test_values_without_a_paired_test_claim_no_ordering(tmp_path: Path) -> None:
    said = written(rich(), tmp_path)
    assert (
        r"In column \emph{IID}, test accuracy is 70.00\,\% (1 seed) for \emph{ridge} and 70.00\,\% "
        r"(1 seed) for \emph{linear}" in said
    )
    assert "These numbers were not compared by a paired test: they support no ordering." in said


def test_rows_are_compared_in_a_column_that_they_share() -> None:
    ridge, central, even = (cell(mean, [0, 1]) for mean in (48.34, 50.02, 49.15))
    cells: Cells = [[None, ridge], [central, even]]
    table = Grid("a", "heads", "", "", "", ["ridge", "linear"], ["central", "IID"], cells)
    assert prose.reached(table) == (
        r"In column \emph{IID}, test accuracy is 48.34 $\pm$ 0.42\,\% (2 seeds) for \emph{ridge} "
        r"and 49.15 $\pm$ 0.42\,\% (2 seeds) for \emph{linear}."
    )
    apart = replace(table, cells=[[None, ridge], [central, None]])
    assert prose.reached(apart) == (
        r"In column \emph{central}, test accuracy is 50.02 $\pm$ 0.42\,\% (2 seeds) for "
        r"\emph{linear}. Without a run there: \emph{ridge}."
    )


def test_seeds_are_counted_and_untrained_models_marked_at_every_table() -> None:
    grid = replace(compared(LOSS), cells=[[cell(50.0, [0])], [cell(51.0, [0, 1, 2], untrained=2)]])
    placed = floats.table(grid, HERE)
    assert r"test accuracy in \%, $n$ = 1 to 3 seeds." in placed.body
    assert r"$51.00 \pm 0.42^{\dagger}$" in placed.body
    assert r"\footnotesize $^{1}$ One seed, no interval. $^{\dagger}$ In some seeds" in placed.body
    assert r"\footnotesize" not in floats.table(compared(LOSS), HERE).body
    assert "(dense, best before training in 2 of 3 seeds)" in prose.accuracies(
        [("dense", cell(50.0, [0, 1, 2], untrained=2))]
    )


def test_the_settings_table_tells_rates_schedules_and_calibration(tmp_path: Path) -> None:
    facts: dict[str, list[Any]] = {
        "lr": [0.003, 0.1], "schedule": ["constant", "cosine_x"], "weight_decay": [0.0001],
        "l2": [1.0], "calibration_source": ["clients"],
        "calibration_examples": [300, "all"],
    }  # fmt: skip
    said = written(Content(ABOUT, questions(), [chapter(HERE, facts=facts)], [], [], {}), tmp_path)
    for line in (
        r"Learning rate $\eta$ & 0.003, 0.1 \\", r"Learning-rate schedule & constant, cosine\_x \\",
        r"Weight decay $\beta$ & 0.0001 \\", r"Ridge $\lambda$ & 1 \\",
        r"Calibrated on & clients \\", r"Calibration examples & 300, all \\",
    ):  # fmt: skip
        assert line in said
    assert r"\nabla_w L + \beta w" in said


@pytest.mark.parametrize(("candidates", "said"), [
    (1, "Learning rates and weight decay were not tuned in these runs: each method was run"),
    (3, "In 4 of 4 trained cells of the tables the method, with its learning rate and weight"),
])  # fmt: skip
def test_a_choice_on_validation_is_claimed_only_where_one_was_made(
    candidates: int, said: str, tmp_path: Path
) -> None:
    grid = compared(LOSS, GAIN, OPEN)
    cells = [[one and replace(one, candidates=candidates) for one in row] for row in grid.cells]
    content = Content(
        ABOUT, questions(), [chapter(HERE, grids=[replace(grid, cells=cells)])], [], [], {}
    )
    assert said in written(content, tmp_path)


def test_missing_models_are_named() -> None:
    content = rich()
    assert content.chapters[0].headline
    assert r"There is no run of \emph{central, sparse}." in prose.models(
        content.chapters[0].headline
    )


def headings(text: str) -> list[str]:
    return re.findall(r"\\(?:sub)?section\{([^}]*)\}", text)


def test_the_sections_are_those_of_a_paper(tmp_path: Path) -> None:
    every = headings(written(rich(), tmp_path))
    parts = ["Introduction", "Related work", "Method", "Experiments", "Results",
             "Extension: client updates as task vectors", "Limitations", "Conclusion"]  # fmt: skip
    assert [title for title in every if title in parts] == parts


def test_a_section_without_data_is_left_out(tmp_path: Path) -> None:
    said = written(minimal(), tmp_path / "minimal")
    assert "No finished run answers a question of this study." in said
    assert "so no difference was tested" in said
    assert "We measure" not in said
    results = headings(said)
    assert results[results.index("Results") + 1] == "Limitations"
    here = rich().chapters[0]
    few = replace(here, grids=[], headline=None, alphas=[], curves=[], findings=here.findings[:1])
    some = headings(written(replace(rich(), chapters=[few]), tmp_path / "few"))
    assert "Merging: other rules than the mean" in some
    assert "Scaling: how far to go along an update" not in some
    assert "Sparse fine-tuning" not in some


def test_every_section_has_its_place_in_the_template() -> None:
    template = files("fedlens.reporting.paper").joinpath("report.tex.j2").read_text("utf-8")
    for name in SECTIONS:
        for part in ("text", "floats"):
            assert template.count(f"<< results.{name}.{part} >>") == 1


def test_the_authors_words_have_a_place_and_are_never_overwritten(tmp_path: Path) -> None:
    said = written(rich(), tmp_path)
    assert set(re.findall(r"^\\yours\{(\w+)\}", said, re.M)) == set(PLACES)
    own = tmp_path / "discussion.tex"
    assert all(line.startswith("%") for line in own.read_text().splitlines())
    own.write_text("mine")
    paper.write(rich(), tmp_path, tmp_path / "figures")
    assert own.read_text() == "mine"


def test_the_split_over_clients_is_described(tmp_path: Path) -> None:
    here = rich().chapters[0]
    held = {"classes_per_client": {"min": 1.0, "mean": 1.0, "max": 1.0}}
    parts = [replace(here.partitions[0], summary=held)]
    said = written(replace(rich(), chapters=[replace(here, partitions=parts)]), tmp_path)
    assert r"The training images are split by \emph{IID} (2 clients, 1 class each)." in said


def test_suites_that_are_named_exist() -> None:
    there = {path.name for path in files("fedlens.config.presets").joinpath("suite").iterdir()}
    assert {f"{one.suite}.yaml" for one in questions()} <= there


def test_an_alpha_at_the_end_of_its_grid_is_told_with_a_warning() -> None:
    curve = AlphaCurve("a", "run", "base", [0.0, 1.0, 1.5], [1.0] * 3, [1.0] * 3, 1.5, 49.82, 49.56,
                       0.25, "r")  # fmt: skip
    said = analyses.scaled(curve)
    assert (
        r"chose $\alpha$ = 1.5, with a test accuracy of 49.82\,\%; as trained it is 49.56" in said
    )
    assert "largest that was tried" in said
    assert "barrier between both models is 0.2500" in said
    assert r"On validation this $\alpha$ is tied with 0 and 1." in said
    inner = analyses.scaled(replace(curve, chosen=1.0, accuracy=[1.0, 2.0, 1.0], barrier=None))
    assert "largest that was tried" not in inner
    assert "tied" not in inner


def test_what_was_observed_goes_from_the_first_round_to_the_last() -> None:
    seen = Observation("IID", ["r"], [1, 5, 9], [2.0, 1.5, 1.0], [0.5, 0.4, -0.1], [None] * 3)
    assert analyses.observed(seen, 0.3) == (
        r"For \emph{IID} (1 seed, learning rate 0.3), from round 1 to round 9, drift goes from "
        "2.000 to 1.000 and the cosine of updates from 0.500 to $-$0.100."
    )
    assert r"\emph{IID} (2 seeds), from" in analyses.observed(replace(seen, runs=["r", "s"]), None)
    assert analyses.observed(replace(seen, drift=[], cosine=[]), 0.3) == ""


def observed_grid(
    name: str, rates: list[list[float]], seeds: int = 1, note: str = ""
) -> tuple[Grid, CurveSet]:
    rows, columns = ["IID", "Nc=1"], ["dense", "sparse"]
    cells: Cells = [[cell(50.0, [0], lr=rate) for rate in row] for row in rates]
    seen = [
        Observation(f"{row}, {column}", ["r"] * seeds, [1, 2], [2.0, 1.0], [], [])
        for row in rows for column in columns
    ]  # fmt: skip
    return (
        Grid(name, name, f"Of {name}", note, "", rows, columns, cells),
        CurveSet(name, name, "", "round", [], seen),
    )


def test_drift_is_told_of_methods_that_differ_in_one_thing() -> None:
    """The learning rate is another thing: a pair that shares it goes first."""
    apart, seen_apart = observed_grid("six_models", [[0.01, 1.0], [0.001, 0.1]])
    alike, seen_alike = observed_grid("local_steps", [[0.3, 0.1], [0.3, 0.2]])
    both = chapter(HERE, headline=apart, grids=[alike], curves=[seen_apart, seen_alike])
    title, first, last = SECTIONS["drift"].sentences(both)
    assert title == r"From \emph{Of local\_steps}:"
    assert first.startswith(r"For \emph{IID, dense} (1 seed, learning rate 0.3)")
    assert last.startswith(r"For \emph{Nc=1, dense} (1 seed, learning rate 0.3)")
    alone = chapter(HERE, headline=apart, curves=[seen_apart])
    _, first, last, mind = SECTIONS["drift"].sentences(alone)
    assert first.startswith(r"For \emph{IID, dense} (1 seed, learning rate 0.01)")
    assert last.startswith(r"For \emph{Nc=1, dense} (1 seed, learning rate 0.001)")
    assert mind == "Their learning rates differ, which changes drift."


def test_drift_is_told_of_the_pair_with_most_seeds_and_of_what_it_shares() -> None:
    few, seen_few = observed_grid("heterogeneity", [[0.3, 0.3], [0.3, 0.3]])
    many, seen_many = observed_grid("local_steps", [[0.1, 0.1], [0.1, 0.1]], 3, "Batch 8.")
    both = chapter(HERE, grids=[few, many], curves=[seen_few, seen_many])
    title, first, _ = SECTIONS["drift"].sentences(both)
    assert title == r"From \emph{Of local\_steps} (Batch 8):"
    assert "(3 seeds, learning rate 0.1)" in first


@pytest.mark.parametrize(("clients", "share"), [(2, 0.5), (3, 0.75), (5, 0.9375)])
def test_signs_at_random_conflict_unless_all_are_alike(clients: int, share: float) -> None:
    drawn = list(product((-1, 1), repeat=clients))
    assert sum(len(set(signs)) > 1 for signs in drawn) / len(drawn) == share
    assert captions.chance(clients) == share


def test_interference_names_its_pair_its_classes_and_chance() -> None:
    record = {
        "clients": [29, 62, 72], "pair": [29, 62], "round": 4, "sign_conflict_of_all": 0.5,
        "accuracy_merged": [0.35, 0.85], "accuracy_alone": [0.35, 0.8],
    }  # fmt: skip
    found = Finding("i", "interference", "full fine-tuning, Nc=1, J=4, seed 0", [], "r", record)
    told = {"classes_per_client": {"min": 1.0, "mean": 1.0, "max": 1.0}}
    few = PartitionPicture("p", "Nc=1", 3, 30, told, [], "r")
    more = replace(few, label="Nc=10", summary={"classes_per_client": {"min": 3, "max": 10}})
    (said,) = SECTIONS["conflicts"].sentences(
        chapter(HERE, findings=[found], partitions=[more, few])
    )
    assert said == (
        r"Clients 29 and 62 merged (round 4 of one run, \emph{full fine-tuning, Nc=1, J=4, seed 0})"
        r": on validation images of the classes they hold (1 class each), their accuracies are "
        r"35.00 and 85.00\,\% merged and 35.00 and 80.00\,\% alone. Signs conflict in 50.00\,\% of "
        r"the weights that two or more of the round's 3 clients change; random signs would "
        r"conflict in 75.00\,\%."
    )
    assert captions.classes(chapter(HERE, partitions=[more]), "x, Nc=10, y") == "3 to 10 classes"
    assert captions.classes(chapter(HERE, partitions=[more]), "x, Nc=1, y") == ""
    still = {**record, "sign_conflict_of_all": None}
    assert "Signs" not in analyses.interfered(replace(found, record=still), "")


def test_rows_that_send_as_much_are_named_together() -> None:
    rows, columns = ["IID", "Nc=1", "central"], ["J=4", "J=8"]
    cells: Cells = [[cell(50.0, [0], megabytes=m) for m in sent] for sent in ((8.0, 4.0),) * 2]
    nothing = cell(50.0, [0], megabytes=None)
    grid = Grid("a", "local_steps", "", "", "", rows, columns, [*cells, [nothing, None]])
    assert prose.sent(grid, "both ways") == (
        r"A run sends (both ways) 8.00\,MB (J=4) and 4.00\,MB (J=8) for \emph{IID} and "
        r"\emph{Nc=1}."
    )
    assert r"For \emph{IID}: 8.00\,MB for 50.00\,\% (J=4, 1 seed)" in prose.accuracy_by_megabytes(
        grid
    )


def test_long_lists_end_with_how_many_more_there_are() -> None:
    assert prose.joined(["a"]) == "a"
    assert prose.listed(["a", "b"]) == "a and b"
    assert prose.listed(list("abcdefgh")) == "a, b, c, d and 4 more"
    fact = ", ".join(str(n) for n in range(100))
    said = analyses.analysed(Finding("m", "merge", "run", [("clients", fact)], "r", {}))
    assert len(said) < 200
    assert said.endswith(r", \dots{}.")


# ---- audit


def test_violations_are_red_and_a_pass_is_plain(tmp_path: Path) -> None:
    content = rich()
    assert r"\textcolor{red}" not in written(content, tmp_path / "a")
    bad = replace(
        content, audit=[Check("Budget", "2 runs", ["one was longer"], []), *content.audit]
    )
    said = written(bad, tmp_path / "b")
    assert (
        said.count(r"\textcolor{red}{The audit of the records found violations in 1 of 3 checks.")
        == 2
    )
    assert r"& \textcolor{red}{1 violation}" in said
    assert r"\textcolor{red}{\textbf{Violations.} one was longer.}" in said


def test_of_many_violations_no_check_is_silent() -> None:
    checks = [Check(f"c{n}", "", [f"{n}: fault {k}" for k in range(5)], []) for n in range(4)]
    told = audit.violations(checks)
    assert {fault[0] for fault in told[:-1]} == set("0123")
    assert told[-1] == "14 more violations in the HTML page"


# ---- LaTeX


@pytest.mark.parametrize(
    "content",
    [rich(), minimal(), EMPTY, nasty(), overflowing()],
    ids=["rich", "minimal", "empty", "nasty", "overflowing"],
)
def test_the_source_is_sound(content: Content, tmp_path: Path, picture: Path) -> None:
    """Groups and environments balance; all that is referred to is there; what floats is named."""
    text = written(content, tmp_path, picture)
    LatexWalker(text, tolerant_parsing=False).get_latex_nodes()
    labels = re.findall(r"\\label\{([^}]*)\}", text)
    assert len(labels) == len(set(labels))
    references = set(re.findall(r"\\ref\{([^}]*)\}", text))
    assert references <= set(labels)
    assert {label for label in labels if label[:4] in ("tab:", "fig:")} <= references
    bibliography = (tmp_path / "references.bib").read_text(encoding="utf-8")
    known = re.findall(r"^@\w+\{(\w+),", bibliography, re.M)
    cited = {key for keys in re.findall(r"\\cite\{([^}]*)\}", text) for key in keys.split(",")}
    assert cited == set(known)
    for name in re.findall(r"\\includegraphics\[[^\]]*\]\{([^}]*)\}", text):
        assert (tmp_path / name).exists()
    tables = len(re.findall(r"\\begin\{table\*?\}", text))
    assert tables <= floats.TABLES + 2
    assert len(re.findall(r"\\begin\{figure\*?\}", text)) <= floats.FIGURES


def test_the_same_content_gives_the_same_bytes(tmp_path: Path, picture: Path) -> None:
    assert written(rich(), tmp_path / "a", picture) == written(rich(), tmp_path / "b", picture)


def test_only_figures_that_were_drawn_are_shown(tmp_path: Path, picture: Path) -> None:
    assert r"\includegraphics" not in written(rich(), tmp_path / "without")
    assert r"\includegraphics" in written(rich(), tmp_path / "with", picture)


def test_a_figure_of_a_setting_that_is_not_spoken_of_is_left_out(
    tmp_path: Path, picture: Path
) -> None:
    grids = [replace(compared(LOSS, GAIN, OPEN), name=name) for name in "abc"]
    settings = [chapter(f"setting {grid.name}", grids=[grid]) for grid in grids]
    content = Content(ABOUT, questions(), settings, [], [], {})
    for name, shown in (("a", 1), ("c", 0)):
        figures = tmp_path / name / "figures"
        figures.mkdir(parents=True)
        shutil.copy(picture, figures / f"{name}.pdf")
        paper.write(content, tmp_path / name, figures)
        text = (tmp_path / name / "report.tex").read_text(encoding="utf-8")
        assert text.count(r"\includegraphics") == shown


def test_a_figure_wider_than_a_column_goes_over_both(tmp_path: Path, picture: Path) -> None:
    narrow = tmp_path / "narrow.pdf"
    Figure(figsize=(3.4, 2)).savefig(narrow)
    assert r"\begin{figure*}" in written(rich(), tmp_path / "wide", picture)
    text = written(rich(), tmp_path / "narrow", narrow)
    assert r"\begin{figure}" in text
    assert r"\begin{figure*}" not in text


@pytest.mark.parametrize(("text", "tex"), [
    ("a_b 5% & $", r"a\_b 5\% \& \$"), ("Erdős Łódź", "Erdős Łódź"), ("Ħ 中 ﬁ ℃", r"? ? fi C"),
    ("α−σ", r"$\alpha$$-$$\sigma$"),
])  # fmt: skip
def test_any_text_can_be_printed(text: str, tex: str) -> None:
    assert prose.tex(text) == tex


def test_room_is_shared_out_section_by_section() -> None:
    shares = floats.shared_out({"a": [1, 2, 3], "b": [], "c": [4, 5]}, 3)
    assert shares == {"a": [1, 2], "b": [], "c": [4]}


def pages(folder: Path) -> list[int]:
    """Of everything with a label: tables, figures, and the end of the text."""
    found = re.findall(r"\\newlabel\{((?:tab|fig|body):[^}]*)\}\{\{[^}]*\}\{(\d+)\}",
                       (folder / "report.aux").read_text(encoding="utf-8"))  # fmt: skip
    assert any(label == "body:end" for label, _ in found)
    return [int(page) for _, page in found]


@needs_latexmk
@pytest.mark.parametrize("content", [EMPTY, nasty(), overflowing()], ids=["empty", "nasty", "over"])
def test_it_compiles_to_few_pages(content: Content, tmp_path: Path, picture: Path) -> None:
    written(content, tmp_path, picture)
    pdf = paper.compile_pdf(tmp_path, tidy=False)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert max(pages(tmp_path)) <= PAGES
    log = (tmp_path / "report.log").read_text(encoding="utf-8", errors="replace")
    assert "undefined" not in log
    overfull = [float(width) for width in re.findall(r"Overfull \\hbox \((\S+?)pt too wide", log)]
    assert max(overfull, default=0.0) < 5


@needs_latexmk
def test_a_source_that_does_not_compile_is_one_sentence_naming_the_log(tmp_path: Path) -> None:
    (tmp_path / "report.tex").write_text(r"\documentclass{article}\begin{document}\nonsense")
    with pytest.raises(FedlensError, match=r"Undefined control sequence.*report\.log\.$"):
        paper.compile_pdf(tmp_path)
    assert (tmp_path / "report.log").exists()


def test_without_latexmk_the_source_stays_and_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FedlensError, match="latexmk is not installed"):
        paper.compile_pdf(tmp_path)


def test_what_tex_leaves_behind_is_removed_and_there_is_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a latexmk that only makes files."""
    tool = tmp_path / "bin" / "latexmk"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\nfor e in aux bbl blg fdb_latexmk fls log out pdf; do : > report.$e; done\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    out = tmp_path / "out"
    out.mkdir()
    assert paper.compile_pdf(out) == out / "report.pdf"
    assert [path.name for path in out.iterdir()] == ["report.pdf"]
    tool.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr("fedlens.reporting.paper.compile.TIMEOUT_S", 0.1)
    with pytest.raises(FedlensError, match="did not finish"):
        paper.compile_pdf(out)


def test_people_of_one_place_stand_together(tmp_path: Path) -> None:
    people = [Author("Ada", "s1", "Here"), Author("Cy", "s3", "There"), Author("Ben", "", "Here")]
    content = Content(replace(ABOUT, authors=people), questions(), [chapter(HERE)], [], [], {})
    text = written(content, tmp_path)
    assert r"Ada (s1) and Ben\\\textit{Here}" in text
    assert r"Cy (s3)\\\textit{There}" in text


def test_sentences_on_drift_cite_no_table_of_accuracies(tmp_path: Path) -> None:
    said = written(rich(), tmp_path)
    drift = said[said.index("random updates have a sign agreement of one half") :]
    assert "drift goes from" in drift
    assert "tab:" not in drift[: drift.index("\n\n")]
