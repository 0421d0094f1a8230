import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from fedlens.errors import FedlensError
from fedlens.reporting.figures.masks import mask_figure
from fedlens.reporting.terminal.masks import density_table, mask_labels, mask_page, overlap_table

KINDS = ("patch", "q", "mlp")


def tally(trained: int, total: int) -> dict[str, Any]:
    return {"trained": trained, "total": total, "density": trained / total}


def record(label: str = "random 10%", scale: int = 1) -> dict[str, Any]:
    """A patch embedding of 40 weights and two blocks, each of q (100) and mlp (300)."""
    return {
        "label": label,
        "path": "masks.safetensors",
        "provenance": {"rule": "least_sensitive", "density": 0.1, "rounds": 4, "voting": None},
        "all": tally(84 * scale, 840),
        "layers": {
            "embedding": tally(10 * scale, 40),
            "block 0": tally(0, 400),
            "block 1": tally(74 * scale, 400),
        },
        "kinds": {
            "patch": tally(10 * scale, 40),
            "q": tally(50 * scale, 200),
            "mlp": tally(24 * scale, 600),
        },
        "table": {
            "embedding": {"patch": tally(10 * scale, 40)},
            "block 0": {"q": tally(0, 100), "mlp": tally(0, 300)},
            "block 1": {"q": tally(50 * scale, 100), "mlp": tally(24 * scale, 300)},
        },
    }


def overlap(labels: list[str]) -> dict[str, Any]:
    jaccard = [[1.0 if a == b else 0.3125 for b in labels] for a in labels]
    return {
        "labels": labels,
        "jaccard": jaccard,
        "by_chance": [[0.0526] * len(labels)] * len(labels),
    }


def printed(what: RenderableType, width: int = 120) -> list[str]:
    page = StringIO()
    Console(width=width, file=page).print(what)
    return page.getvalue().splitlines()


def words(path: Path) -> str:
    """An SVG draws its words as glyphs and keeps each as a comment."""
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    return text


def test_the_table_has_every_density_and_the_totals() -> None:
    cells = [line.split() for line in printed(density_table(record()))]
    assert cells == [
        ["density", "in", "%", *KINDS, "all"],
        ["embedding", "25.00", "–", "–", "25.00"],
        ["block", "0", "–", "0", "0", "0"],
        ["block", "1", "–", "50.00", "8.00", "18.50"],
        ["all", "25.00", "25.00", "4.00", "10.00"],
    ]


def test_little_is_not_shown_as_nothing() -> None:
    tiny = record()
    tiny["all"] = tally(1, 10**6)
    assert printed(density_table(tiny))[-1].split()[-1] == "<0.01"
    tiny["all"] = tally(50, 10**6)
    assert printed(density_table(tiny))[-1].split()[-1] == "0.01"


def test_a_page_tells_what_is_known_and_no_more() -> None:
    lines = [" ".join(line.split()) for line in printed(mask_page(record("[bold] 10%")))]
    assert lines[:5] == [
        "[bold] 10%",
        "file masks.safetensors",
        "mask rule least sensitive, density 0.1",
        "calibration rounds 4",
        "trained 84 of 840 weights",
    ]
    bare = {**record(), "provenance": {}}
    assert [line.split()[0] for line in printed(mask_page(bare))[1:3]] == ["file", "trained"]


def test_overlap_is_told_beside_chance() -> None:
    lines = [" ".join(line.split()) for line in printed(overlap_table(overlap(["a", "b"])))]
    assert lines == [
        "Jaccard overlap 1 2",
        "1 a 1 0.312 (0.053 by chance)",
        "2 b 0.312 (0.053 by chance) 1",
    ]


def test_labels_are_short_where_short_ones_differ() -> None:
    one, other = {"rule": "least_sensitive", "density": 0.1}, {"rule": "random", "density": 0.07}
    assert mask_labels([one, other], ["a", "b"]) == ["least sensitive 10%", "random 7%"]
    assert mask_labels([one, {**one, "density": 0.005}], ["a", "b"])[1] == "least sensitive 0.5%"
    assert mask_labels([one, other, one], ["a", "b", "c"]) == ["a", "b", "c"]
    assert mask_labels([one, {"rule": "random"}], ["a", "b"]) == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_the_format_follows_the_suffix(count: int, tmp_path: Path) -> None:
    labels = [f"mask {i}" for i in range(count)]
    together = overlap(labels) if count > 1 else None
    for suffix, start in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
        path = tmp_path / f"masks.{suffix}"
        mask_figure([record(label) for label in labels], path, overlap=together)
        assert path.read_bytes().startswith(start)
    width, height = struct.unpack(">II", (tmp_path / "masks.png").read_bytes()[16:24])
    assert min(width, height) > 300
    assert (tmp_path / "masks.pdf").read_bytes().rstrip().endswith(b"%%EOF")
    with pytest.raises(FedlensError, match=r"not 'masks\.gif'"):
        mask_figure([record()], tmp_path / "masks.gif")
    assert len(list(tmp_path.iterdir())) == 3


def test_one_mask_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    mask_figure([record()], tmp_path / "one.svg")
    text = words(tmp_path / "one.svg")
    for word in (
        "random 10%",
        "84 of 840 weights trained",
        "block 1",
        "mlp",
        "by kind",
        "by layer",
    ):
        assert f"<!-- {word}" in text
    # 25 %: a cell, its layer's bar and its kind's, and the bar of q; 0: two cells and a layer's bar
    counts = {"25.0": 4, "0": 3, "50.0": 1, "8.00": 1, "18.5": 1, "4.00": 1, "–": 4}
    assert {word: text.count(f"<!-- {word} -->") for word in counts} == counts
    assert "all: 10.0%" in text


@pytest.mark.slow
def test_several_masks_share_a_scale_and_are_compared(tmp_path: Path) -> None:
    labels = ["lowest magnitude 10%", "a_run_of_a_very_long_name_" * 4 + "s1", r"no $\maths$ here"]
    masks = [record(label, scale=1 + (i == 0)) for i, label in enumerate(labels)]
    mask_figure(masks, tmp_path / "several.svg", overlap=overlap(labels))
    text = words(tmp_path / "several.svg")
    assert text.count("<!-- density -->") == 1
    assert text.count("<!-- 100% -->") == 1  # the scale reaches to the densest of all masks
    assert text.count("<!-- block 1 -->") == 2  # beside the left panel of either row
    assert text.count("<!-- 0.312 -->") == text.count("<!-- (0.053) -->") == 6
    assert text.count(r"<!-- 3  no $\maths$ here -->") == 2
    assert text.count("<!-- 50 -->") == 3  # of the first mask's patches, of the others' q
    assert text.count("<!-- 100 -->") == 1


def test_colours_go_from_nothing_to_the_densest_cell_of_all() -> None:
    from fedlens.reporting.figures.masks import _scale

    scale = _scale([record(), record(scale=2)])
    assert (scale.vmin, scale.vmax) == (0, 1)
    assert scale(0.25) == 0.5  # zero beside one: by the square root
    even = record()
    even["table"] = {"block 0": {"q": tally(1, 10), "mlp": tally(4, 10)}}
    assert _scale([even])(0.1) == 0.25
    assert _scale([record(scale=0)]).vmax == 1


def test_masks_of_nothing_and_of_everything_are_drawn(tmp_path: Path) -> None:
    one = tally(7, 7)
    whole = {**record(), "all": one, "layers": {"x": one}, "kinds": {"other": one}}
    whole["table"] = {"x": {"other": one}}
    mask_figure([whole], tmp_path / "whole.svg")
    assert words(tmp_path / "whole.svg").count("<!-- 100 -->") == 3
    mask_figure([record(scale=0)], tmp_path / "empty.svg")
    assert "all: 0%" in words(tmp_path / "empty.svg")


def test_numbers_in_cells_keep_digits_that_count() -> None:
    from fedlens.reporting.figures.masks import _percent

    said = {0.99996: "100", 0.0996: "10", 0.0344: "3.4", 0.00321: "0.32", 0.0003: "0.03"}
    said |= {0.00004: "<0.01", 0.0: "0", float("nan"): "–"}
    assert {density: _percent(density, 2) for density in said} == said


@pytest.mark.slow
def test_drawing_and_tables_load_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys, fedlens.reporting.figures.masks, fedlens.reporting.terminal.masks;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib.pyplot')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
