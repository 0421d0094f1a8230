import csv
import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.reporting.study.content import Cell, Contrast, Grid
from fedlens.reporting.study.tables import (
    contrast_value,
    contrasts_csv,
    escape,
    latex,
    latex_notes,
    markdown,
    to_csv,
    value,
)

SEVERAL = Cell(
    mean=54.687, deviation=0.17, half=0.4223, validation=55.0, seeds=[0, 1, 2], method="dense, IID",
    lr=0.03, candidates=4, megabytes=307.25, runs=["a_s0", "a_s1", "a_s2"],
)  # fmt: skip
SINGLE = replace(SEVERAL, mean=78.741, deviation=None, half=None, seeds=[7], runs=["b"], lr=0.1)
FROZEN = replace(SEVERAL, mean=48.5, lr=None, megabytes=None, validation=None)
UNTRAINED = replace(SEVERAL, untrained=2)
CONTRAST = Contrast("dense", "IID", "J=4", -1.234, 0.456, 3, 0.004, 0.012)


def grid(*rows: list[Cell | None], contrasts: tuple[Contrast, ...] = ()) -> Grid:
    return Grid(
        name="a_table", question="heads", title="Heads", note="", corner="trained",
        rows=[f"row_{place}" for place in range(len(rows))],
        columns=[f"Nc={place}" for place in range(len(rows[0]))],
        cells=[list(row) for row in rows], contrasts=list(contrasts),
    )  # fmt: skip


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_value_has_its_interval_or_says_that_it_is_of_one_seed() -> None:
    assert value(SEVERAL) == "54.69 ± 0.42"
    assert value(SINGLE) == "78.74 (1 seed)"
    assert value(SEVERAL, lr=True) == "54.69 ± 0.42 (lr 0.03)"
    assert value(SINGLE, lr=True) == "78.74 (1 seed, lr 0.1)"
    assert value(FROZEN, lr=True) == "48.50 ± 0.42"
    assert value(UNTRAINED) == "54.69 ± 0.42 †"
    assert value(replace(SINGLE, untrained=1)) == "78.74 † (1 seed)"


@pytest.mark.parametrize(
    ("contrast", "words"),
    [
        (CONTRAST, "−1.23 ± 0.46 (p = 0.012)"),
        (replace(CONTRAST, mean=2.0, corrected=0.00004), "+2.00 ± 0.46 (p < 0.001)"),
        (replace(CONTRAST, corrected=0.05), "−1.23 ± 0.46 (p = 0.050, not significant)"),
        (replace(CONTRAST, corrected=0.31), "−1.23 ± 0.46 (p = 0.310, not significant)"),
        (replace(CONTRAST, count=2), "−1.23 ± 0.46 (p = 0.012, too few seeds to test)"),
        (replace(CONTRAST, half=0.0, p=None, corrected=None), "−1.23 ± 0.00 (not significant)"),
        (
            replace(CONTRAST, half=None, p=None, corrected=None, count=1),
            "−1.23 (too few seeds to test)",
        ),
    ],
)
def test_a_difference_says_whether_the_seeds_decide_it(contrast: Contrast, words: str) -> None:
    assert contrast_value(contrast) == words


def test_markdown_has_a_line_for_each_row_and_a_dash_where_there_is_no_run() -> None:
    assert markdown(grid([SEVERAL, None], [SEVERAL, replace(SINGLE, lr=0.03)])).splitlines() == [
        "| trained | Nc=0 | Nc=1 |",
        "| --- | ---: | ---: |",
        "| row_0 | 54.69 ± 0.42 | – |",
        "| row_1 | 54.69 ± 0.42 | 78.74 (1 seed) |",
        "",
        "n = 1 to 3 seeds.",
    ]


def test_a_model_tested_before_any_training_is_marked_in_every_format() -> None:
    start = "In some seeds the parameters before any training were the best on validation."
    table = grid([UNTRAINED, SEVERAL, replace(SINGLE, untrained=1)])
    assert markdown(table).splitlines()[-1] == f"n = 1 to 3 seeds. † {start}"
    assert r"$54.69 \pm 0.42^{\dagger}$" in latex(table)
    assert "$78.74^{1\\dagger}$" in latex(table)
    assert latex_notes(table).count(start) == 1
    assert [line["untrained"] for line in read(to_csv(table))] == ["2", "0", "1"]
    assert start not in markdown(grid([SEVERAL])) + latex_notes(grid([SEVERAL]))


def test_differences_stand_below_the_accuracies() -> None:
    lines = markdown(grid([SEVERAL], contrasts=(CONTRAST,))).splitlines()
    assert lines[-1] == "| dense | IID | J=4 | −1.23 ± 0.46 (p = 0.012) | 3 |"
    assert any("Holm" in line for line in lines)


def test_learning_rates_are_told_only_where_they_differ() -> None:
    assert "lr" not in markdown(grid([SEVERAL, FROZEN]))
    told = grid([SEVERAL, SINGLE, FROZEN])
    assert "(lr 0.03)" in markdown(told)
    assert r"{\scriptsize (0.03)}" in latex(told)
    assert "learning rate" in latex_notes(told)
    assert latex_notes(grid([SEVERAL, FROZEN])) == ""


def test_a_bar_in_a_name_does_not_split_its_column() -> None:
    told = replace(grid([SEVERAL]), rows=["a|b"])
    assert r"| a\|b | 54.69 ± 0.42 |" in markdown(told)


def test_csv_has_a_line_for_each_cell_with_its_runs() -> None:
    lines = read(to_csv(grid([SEVERAL, None], [FROZEN, SINGLE])))
    places = [(line["row"], line["column"]) for line in lines]
    assert places == [("row_0", "Nc=0"), ("row_1", "Nc=0"), ("row_1", "Nc=1")]
    assert lines[0] == {
        "table": "a_table", "row": "row_0", "column": "Nc=0", "mean": "54.687",
        "sample deviation": "0.17", "half width": "0.4223", "seeds": "0 1 2", "validation": "55",
        "learning rate": "0.03", "candidates": "4", "untrained": "0", "megabytes": "307.25",
        "method": "dense, IID", "runs": "a_s0 a_s1 a_s2",
    }  # fmt: skip
    assert lines[1]["learning rate"] == lines[1]["megabytes"] == lines[1]["validation"] == ""
    assert lines[2]["sample deviation"] == lines[2]["half width"] == ""


def test_binary_noise_is_not_written() -> None:
    noisy = replace(SEVERAL, mean=0.1 + 0.2, megabytes=773.5200000000041)
    (line,) = read(to_csv(grid([noisy])))
    assert (line["mean"], line["megabytes"]) == ("0.3", "773.52")


def test_differences_as_csv() -> None:
    one = replace(CONTRAST, half=None, count=1, p=None, corrected=None)
    first, second = read(contrasts_csv(grid([SEVERAL], contrasts=(CONTRAST, one))))
    assert list(first.values()) == [
        "a_table", "dense", "IID", "J=4", "-1.234", "0.456", "3", "0.004", "0.012",
    ]  # fmt: skip
    assert list(second.values())[5:] == ["", "1", "", ""]


def test_a_tabular_has_rules_and_explains_its_marks() -> None:
    lines = latex(replace(grid([SEVERAL, None], [SEVERAL, SEVERAL]), corner="")).splitlines()
    assert lines == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r" & Nc=0 & Nc=1 \\",
        r"\midrule",
        r"row\_0 & $54.69 \pm 0.42$ & -- \\",
        r"row\_1 & $54.69 \pm 0.42$ & $54.69 \pm 0.42$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert r"row\_0 & $78.74^{1}$ \\" in latex(grid([SINGLE]))
    assert latex_notes(grid([SINGLE])) == "$^{1}$ One seed, no interval."


def test_what_latex_would_read_as_a_command_is_printed() -> None:
    assert escape("100% & $x_1$ #~^{}") == (
        r"100\% \& \$x\_1\$ \#\textasciitilde{}\textasciicircum{}\{\}"
    )
    assert escape("a\\b") == r"a\textbackslash{}b"
    assert escape("α × σ − λ") == r"$\alpha$ $\times$ $\sigma$ $-$ $\lambda$"
    assert escape("plain, Nc=5 (é)") == "plain, Nc=5 (é)"


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \\{}$&#%_^~<>|αλσ×−±", max_size=20))
def test_escaped_text_is_balanced_and_holds_nothing_special(text: str) -> None:
    bare = re.sub(r"\\([{}$&#%_]|[a-z]+(\{\})?)", "", escape(text))
    assert bare.count("$") % 2 == 0
    assert not set(bare) & set("\\{}&#%_~")
