import struct
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from fedlens.reporting.figures.accuracy import grid_figure, over_seeds
from fedlens.reporting.figures.learning_curves import arranged, comparable, drawable, parts
from fedlens.reporting.figures.palette import palette
from fedlens.reporting.figures.report import figures, write
from fedlens.reporting.figures.style import COLUMN, TEXT, paper
from fedlens.reporting.study.content import (
    About,
    AlphaCurve,
    Cell,
    Chapter,
    Content,
    Curve,
    CurveSet,
    Finding,
    Grid,
    MaskMap,
    Observation,
    PartitionPicture,
)
from fedlens.reporting.study.curves import cell_label
from fedlens.reporting.study.questions import questions

PARTITIONS = ["IID", "Nc=10", "Nc=1"]
RULES = [
    "least sensitive", "most sensitive", "lowest magnitude", "highest magnitude", "random",
]  # fmt: skip
ALGORITHMS = ["FedAvg", *(f"algorithm {letter}" for letter in "abcdefghi")]
QUESTIONS = {one.name: one for one in questions()}
START = "ridge head, no fine-tuning"
TABLES = {  # question → rows, columns
    "six_models": (["central", "FedAvg, IID", "FedAvg, Nc=1"], ["dense", "sparse"]),
    "central": (["full fine-tuning, linear head", START], ["accuracy"]),
    "schedules": (["constant", "cosine, warm-up 0.1", "linear"], PARTITIONS[:2]),
    "heads": ([START, "linear head trained, backbone frozen"], PARTITIONS),
    "heterogeneity": (PARTITIONS, ["J=8"]),
    "local_steps": (PARTITIONS, ["J=4", "J=8", "J=16"]),
    "mask_rules": ([START, "dense", *RULES], PARTITIONS[:2]),
    "sparsity": (["dense", "density 0.5", "density 0.1", "density 0.01"], PARTITIONS[:2]),
    "calibration_rounds": (["1 round", "4 rounds", "10 rounds"], PARTITIONS[:1]),
    "algorithms": (ALGORITHMS, PARTITIONS),
}


def cell(mean: float, seeds: int = 3) -> Cell:
    several = seeds > 1
    return Cell(
        mean=mean, deviation=0.5 if several else None, half=1.25 if several else None,
        validation=mean, seeds=list(range(seeds)), method="a method", lr=0.1, candidates=1,
        megabytes=10.0, runs=[f"run_s{seed}" for seed in range(seeds)],
    )  # fmt: skip


LEVELS = {"mask_rules": [START, "dense"], "sparsity": ["dense"]}


def grid(question: str, seeds: int = 3) -> Grid:
    rows, columns = TABLES[question]
    cells: list[list[Cell | None]] = [
        [cell(50 + 3 * down - 2 * across, seeds) for across in range(len(columns))]
        for down in range(len(rows))
    ]
    return Grid(
        question, question, f"Title of {question}", "A note.", "", rows, columns, cells,
        levels=LEVELS.get(question, []),
    )  # fmt: skip


def curve(label: str, place: int, *, seeds: int = 3) -> Curve:
    central = label.startswith("central")
    each = 70 if central else int(label.partition("J=")[2] or 8)  # steps in an epoch or a round
    units = list(range(0 if place % 2 else 5, 30, 5))
    rate = 0.1 if "sparse" in label or "density" in label else 1.0
    return Curve(
        label=label,
        runs=[f"run_s{seed}" for seed in range(seeds)],
        unit=units,
        steps=[unit * each for unit in units],
        megabytes=[] if central else [unit * rate for unit in units],
        mean=[40 + place + 0.5 * unit for unit in units],
        half=[1.5 if seeds > 1 else None for _ in units],
    )


def curves(table: Grid, seeds: int = 3) -> CurveSet:
    labels = [
        cell_label(table.rows, table.columns, place)
        for place in product(table.rows, table.columns)
        if place[0] != START
    ]
    return CurveSet(
        name=table.name,
        question=table.question,
        title=table.title,
        unit="epoch" if table.question == "central" else "round",
        curves=[curve(label, place, seeds=seeds) for place, label in enumerate(labels)],
        observations=[
            Observation(label, ["run"], [1, 2, 3], [3.0, 2.0, place], [0.5, None, 0.1], [0.6] * 3)
            for place, label in enumerate(labels)
            if not label.startswith("central") and table.question != "central"
        ],
    )  # fmt: skip


def mask(place: int, rule: str) -> MaskMap:
    density = [[0.2, None], [0.1 * place, 0.0]]
    label = f"{rule}, density 0.1, IID"
    layers, kinds = ["embedding", "block 0"], ["patch", "q"]
    return MaskMap(f"mask-{place}", rule, label, 10, 100, layers, kinds, density, "run")


def partition(place: int, clients: int = 3) -> PartitionPicture:
    one = {"min": 1.0, "mean": 2.0, "max": 3.0}
    summary = dict.fromkeys(("sizes", "classes_per_client", "label_entropy", "emd"), one)
    held = [[4, 0], [0, 4], [2, 2]] if clients == 3 else []
    label = [*PARTITIONS, *(f"Nc={n}" for n in range(2, 9))][place - 1]
    return PartitionPicture(f"partition-{place}", label, clients, 12, summary, held, "run")


def chapter(setting: str = "a setting", seeds: int = 3) -> Chapter:
    grids = [grid(name, seeds) for name in TABLES]
    alpha = AlphaCurve(
        name="alpha-1", label="a run, seed 0", base="pretrained", alphas=[0.0, 0.5, 1.0],
        accuracy=[40.0, 55.0, 50.0], loss=[2.0, 1.9, 1.0], chosen=0.5, test=54.0, as_trained=50.0,
        barrier=0.4, run="run",
    )  # fmt: skip
    points = [{"alpha": a, "validation": {"top1": 0.5, "loss": 1.0}} for a in (0.0, 1.0)]
    record = {
        "kind": "compose", "candidates": points, "chosen": 1, "test": {"top1": 0.5},
        "terms": {"a": 1.0, "b": -1.0},
    }  # fmt: skip
    return Chapter(
        setting=setting,
        headline=grids[0],
        grids=grids[1:],
        curves=[curves(table, seeds) for table in grids],
        masks=[mask(place, RULES[place % 5]) for place in range(1, 9)],
        alphas=[alpha],
        findings=[Finding("compose-1", "compose", "two runs", [("model", "θ")], "run", record)],
        partitions=[*(partition(place) for place in range(1, 9)), partition(9, clients=5000)],
        facts={},
    )  # fmt: skip


def content(*chapters: Chapter) -> Content:
    return Content(About(), questions(), list(chapters), [], [], {})


WHOLE = figures(content(chapter()))
BY_NAME = {drawing.name: drawing for drawing in WHOLE}


def drawn(name: str) -> Figure:
    with paper():
        figure = BY_NAME[name].draw()
        figure.draw_without_rendering()
    return figure


def words(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(Text) if t.get_visible() and t.get_text()]


def legend(figure: Figure) -> list[str]:
    (found,) = figure.findobj(Legend, include_self=False)
    return [text.get_text() for text in found.get_texts()]


def test_every_table_and_every_set_of_curves_has_its_pictures() -> None:
    kinds = {kind: [d.name for d in WHOLE if d.kind == kind] for kind in {d.kind for d in WHOLE}}
    assert kinds["grid"] == list(TABLES)
    for name in TABLES:
        assert f"{name}-rounds" in kinds["curves"]
        assert (f"{name}-observations" in kinds["observations"]) == (name != "central")
    assert "local_steps-steps" in kinds["curves"]  # where J differs, and there alone
    assert "mask_rules-steps" not in kinds["curves"]
    # What every method sends alike is no news: only densities differ here.
    assert kinds["bytes"] == ["six_models-bytes", "sparsity-bytes"]
    assert kinds["mask"] == ["masks", *(f"mask-{n}" for n in (5, 1, 2, 3, 4, 6))]
    assert kinds["partition"] == [f"partition-{n}" for n in (1, 3, 4, 6, 7, 9)]
    assert kinds["alpha"] == ["alpha-1"]
    assert kinds["finding"] == ["compose-1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [d.name for d in WHOLE])
def test_every_picture_fits_a_column_or_the_text_and_shows_all_its_words(name: str) -> None:
    figure = drawn(name)
    width, height = figure.get_size_inches()
    assert width in (COLUMN, TEXT)
    assert height < 5
    assert min(t.get_fontsize() for t in figure.findobj(Text) if t.get_text()) >= 7
    inked = figure.get_tightbbox()  # in inches
    assert inked.x0 > -0.01
    assert inked.y0 > -0.01
    assert inked.x1 < width + 0.01
    assert inked.y1 < height + 0.01


@pytest.mark.slow
def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    some = [BY_NAME[name] for name in ("mask_rules", "heads-rounds", "masks")]
    first = write(some, tmp_path / "first")
    BY_NAME["partition-3"].draw()  # another order, and another figure between
    second = write(some[::-1], tmp_path / "second")
    assert len(first) == 9
    assert sorted(p.name for p in first) == sorted(p.name for p in second)
    for path in first:
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_files_say_neither_when_nor_by_which_version_they_were_made(tmp_path: Path) -> None:
    png, svg, pdf = write([BY_NAME["heads"]], tmp_path)
    assert b"Software" not in png.read_bytes()
    assert struct.unpack(">II", png.read_bytes()[16:24])[0] == round(COLUMN * 240)
    assert b"<dc:date>" not in svg.read_bytes()
    assert b"CreationDate" not in pdf.read_bytes()
    assert b"/CIDFontType2" in pdf.read_bytes()  # TrueType, embedded
    assert b"/FontFile2" in pdf.read_bytes()


def test_names_are_unique_over_settings() -> None:
    names = [d.name for d in figures(content(chapter("one"), chapter("two")))]
    assert len(names) == len(set(names)) == 2 * len(WHOLE)
    assert "alpha-1-setting2" in names


def test_a_study_of_one_run_has_no_pictures_but_what_there_is_to_see() -> None:
    bare = Chapter("a setting", None, [], [], [], [], [], [], {})
    assert figures(content(bare)) == []
    lonely = replace(grid("central"), rows=["a"], cells=[[cell(50)]])
    assert figures(content(replace(bare, grids=[lonely]))) == []


def test_drawing_leaves_no_setting_behind(tmp_path: Path) -> None:
    before = dict(rcParams)
    write([BY_NAME["heads"]], tmp_path, formats=["svg"])
    assert dict(rcParams) == before


@pytest.mark.slow
def test_one_seed_is_told_and_hollow() -> None:
    single = {d.name: d for d in figures(content(chapter(seeds=1)))}
    for name in ("heads", "mask_rules", "local_steps", "sparsity", "heads-rounds"):
        with paper():
            figure = single[name].draw()
        assert "1 seed" in words(figure)
        assert "mean and 95 % interval of 3 seeds" in words(drawn(name))
    with paper():
        dots = single["heads"].draw().axes[0].get_lines()
    assert {line.get_markerfacecolor() for line in dots} == {"white"}
    assert not single["local_steps-rounds"].draw().axes[0].collections
    assert over_seeds([1, 3, 2, 3], "no band: 1 seed") == (
        "mean and 95 % interval of 2–3 seeds; no band: 1 seed"
    )


@pytest.mark.slow
def test_a_thing_has_the_same_look_in_every_picture() -> None:
    for name in ("local_steps", "local_steps-rounds", "sparsity", "heads-rounds"):
        (box,) = drawn(name).findobj(Legend, include_self=False)
        found = dict(zip(legend(drawn(name)), box.get_lines(), strict=True))
        assert found["IID"].get_color() == "#0072B2"
        assert found["Nc=10"].get_marker() == "s"
    (box,) = drawn("mask_rules-rounds").findobj(Legend, include_self=False)
    found = dict(zip(legend(drawn("mask_rules-rounds")), box.get_lines(), strict=True))
    assert found["dense"].get_color() == "#000000"
    looked = [(line.get_color(), line.get_marker()) for line in found.values()]
    assert len({colour for colour, _ in looked}) == len(looked) == 6


def test_partitions_have_colours_in_the_order_of_their_pictures() -> None:
    assert palette(content(chapter())).partitions[:3] == ("IID", "Nc=10", "Nc=1")


def test_algorithms_and_models_have_looks_of_their_own() -> None:
    rows = ["FedAvg", "FedAvg, server learning rate 2", "FedAvg, cyclic client sampling"]
    same = palette(content(chapter()))
    assert len({same.of(row, rows) for row in rows}) == 3
    assert same.of("FedAvg, IID") == same.of("IID")


def test_a_rule_from_outside_the_package_has_a_look_of_its_own() -> None:
    outside = replace(chapter(), masks=[mask(1, "by a plugin"), mask(2, "random")])
    same = palette(content(outside))
    assert same.of("by a plugin") not in {same.of(rule) for rule in RULES}
    names = [d.caption for d in figures(content(outside)) if d.name == "mask-1"]
    assert "by a plugin" in names[0]


def test_dots_stand_where_the_table_says() -> None:
    figure = drawn("mask_rules")
    first, second = figure.axes
    dots = [line for line in first.get_lines() if line.get_marker() in "os^Dv"]
    assert [float(line.get_xdata()[0]) for line in dots] == [56, 59, 62, 65, 68]  # type: ignore[index]
    assert [t.get_text() for t in first.get_yticklabels()] == RULES
    assert first.get_title() == "IID"
    levels = {line.get_xdata()[0] for line in second.get_lines() if line.get_zorder() == 1}  # type: ignore[index]
    assert levels == {48, 51}
    assert legend(figure) == [START, "dense training"]


def test_density_is_on_a_logarithmic_axis_with_dense_as_a_level() -> None:
    (axes,) = drawn("sparsity").axes
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.01", "0.1", "0.5"]
    levels = [line for line in axes.get_lines() if line.get_zorder() == 1]
    assert [float(line.get_ydata()[0]) for line in levels] == [50, 48]  # type: ignore[index]
    assert set(legend(drawn("sparsity"))) == {"IID", "Nc=10", "dense training"}


@pytest.mark.slow
def test_cells_without_a_run_are_left_out() -> None:
    same = palette(content(chapter()))
    for name in TABLES:
        holes = grid(name)
        holes.cells[-1][-1] = None
        with paper():
            grid_figure(holes, QUESTIONS[name], same).draw_without_rendering()


def test_curves_are_panelled_by_one_side_of_the_table() -> None:
    table = grid("local_steps")
    found = curves(table).curves
    by_steps = arranged(found, table, "columns")
    assert list(by_steps) == ["J=4", "J=8", "J=16"]
    assert list(by_steps["J=8"]) == PARTITIONS
    assert by_steps["J=8"]["Nc=10"].label == "Nc=10, J=8"
    assert list(arranged(list(reversed(found)), table, "rows")) == PARTITIONS
    assert [a.get_title() for a in drawn("local_steps-steps").axes] == PARTITIONS
    assert [a.get_title() for a in drawn("local_steps-rounds").axes] == ["J=4", "J=8", "J=16"]
    assert list(arranged(curves(grid("heads")).curves, grid("heads"), "columns")) == [""]


def test_no_picture_has_more_lines_than_one_can_tell_apart() -> None:
    split = [d for d in WHOLE if d.name.startswith("algorithms-rounds")]
    assert [d.name for d in split] == ["algorithms-rounds", "algorithms-rounds-2"]
    shown = [legend(d.draw()) for d in split]
    assert all("FedAvg" in labels and len(labels) <= 8 for labels in shown)
    assert set(shown[0]) | set(shown[1]) == set(ALGORITHMS)
    table = grid("algorithms")
    pieces = parts(arranged(curves(table).curves, table, "columns"))
    assert sum(len(panel) - 1 for piece in pieces for panel in piece.values()) == 9 * 3


def test_epochs_do_not_stand_beside_rounds() -> None:
    table = replace(grid("six_models"), columns=["dense"])
    together = {"": {label: curve(label, 0) for label in table.rows}}
    assert list(comparable(together, "rounds")[""]) == ["FedAvg, IID", "FedAvg, Nc=1"]
    assert list(comparable(together, "steps")[""]) == table.rows
    assert [axes.get_xlabel() for axes in drawn("six_models-rounds").axes] == [
        "epoch", "round", "round",
    ]  # fmt: skip
    assert drawn("six_models-steps").axes[0].get_xlabel() == "steps"


def test_over_megabytes_a_curve_begins_with_the_first_message() -> None:
    found = drawable(curves(grid("six_models")), "bytes")
    assert all(one.megabytes[0] > 0 and len(one.mean) == len(one.megabytes) for one in found)
    assert {one.label.split(",")[0] for one in found} == {"FedAvg"}
    assert drawn("six_models-bytes").axes[0].get_xscale() == "log"


def test_unknown_measures_have_no_panel_and_gaps_stay_gaps() -> None:
    titles = [a.get_title() for a in drawn("heads-observations").axes]
    assert titles == ["drift from the clients' mean", "cosine between clients", "sign agreement"]
    told = curves(grid("heads"))
    blind = [replace(o, cosine=[None] * 3) for o in told.observations]
    tables = {"grids": [grid("heads")], "curves": [replace(told, observations=blind)]}
    bare = replace(chapter(), headline=None, **tables)  # type: ignore[arg-type]
    (drawing,) = (d for d in figures(content(bare)) if d.kind == "observations")
    assert len(drawing.draw().axes) == 2


def test_a_mask_map_has_a_number_in_every_cell() -> None:
    said = words(drawn("mask-5"))
    assert {"20", "50", "0", "–", "embedding", "patch", "density"} <= set(said)


@pytest.mark.slow
def test_drawing_loads_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys, fedlens.reporting.figures.report, fedlens.reporting.study.tables;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib.pyplot')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
