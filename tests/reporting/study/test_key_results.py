"""The sentences of the first screen claim what their tests allow, and no more."""

from dataclasses import replace

import pytest

from fedlens.reporting.study.content import Answer, Contrast, Grid, Question
from fedlens.reporting.study.key_results import answer, key_results, means, scaled, statement
from tests.reporting.contents import cell, rich

RULES = Question("mask_rules", "Mask rules")
STEPS = Question("local_steps", "Local steps", figure="lines")
LOSS = Contrast("random", "dense", "IID", -1.49, 0.5, 3, 0.01, 0.03)
OPEN = Contrast("sparse", "dense", "IID", 4.0, 4.5, 3, 0.2, 0.31)


def table(*contrasts: Contrast, levels: tuple[str, ...] = ()) -> Grid:
    rows = list(dict.fromkeys([*(c.against for c in contrasts), *(c.row for c in contrasts)]))
    columns = list(dict.fromkeys(c.column for c in contrasts))
    cells = [[cell(50.0 + r, [0, 1, 2]) for _ in columns] for r, _ in enumerate(rows)]
    return Grid("t", "mask_rules", "T", "", "", rows, columns, [*cells],
                list(contrasts), list(levels))  # fmt: skip


@pytest.mark.parametrize(
    ("contrast", "said"),
    [
        (LOSS, "Test accuracy is 1.49 ± 0.50 points lower with random than with dense "
               "(significant: p = 0.030, 3 seeds)"),
        (replace(LOSS, mean=1.49, corrected=0.0499),
         "Test accuracy is 1.49 ± 0.50 points higher with random than with dense (significant: "
         "p = 0.0499, 3 seeds)"),
        (replace(LOSS, row="FedAvg, server learning rate 2"),
         "Test accuracy is 1.49 ± 0.50 points lower with “FedAvg, server learning rate 2” than "
         "with dense (significant: p = 0.030, 3 seeds)"),
        (OPEN, "The difference between sparse and dense is not significant (+4.00 ± 4.50 points, "
               "p = 0.310, 3 seeds)"),
        (replace(LOSS, count=2), "Test accuracy, random minus dense: −1.49 ± 0.50 points (2 seeds; "
                                 "too few seeds to test)"),
        (replace(LOSS, corrected=None),  # the suite does not state it
         "Test accuracy, random minus dense: −1.49 ± 0.50 points (3 seeds; not tested)"),
    ],
)  # fmt: skip
def test_only_a_significant_difference_is_called_higher_or_lower(
    contrast: Contrast, said: str
) -> None:
    assert statement(contrast) == said


def test_of_rows_without_an_order_the_largest_significant_one_is_stated() -> None:
    assert answer(table(LOSS, OPEN), RULES) == [
        "Test accuracy is 1.49 ± 0.50 points lower with random than with dense (significant: p = "
        "0.030, 3 seeds). Of 2 tested differences from dense, 1 is significant: this one."
    ]
    small = replace(OPEN, row="small", mean=0.1)
    assert answer(table(OPEN, small), RULES)[0].endswith(
        "Of 2 tested differences from dense, none is significant; this one is the largest."
    )


def test_of_rows_with_an_order_the_last_tested_one_is_stated() -> None:
    far = replace(OPEN, row="Nc=1", against="IID", column="J=4")
    near = replace(LOSS, row="Nc=5", against="IID", column="J=4")
    alone = replace(far, row="Nc=0", count=1, half=None, p=None, corrected=None)
    steps = Contrast("J=16", "J=4", "Nc=1", -11.2, 5.6, 3, 0.01, 0.026, turned=True)
    said = answer(table(near, far, alone, steps), STEPS)
    assert said[0].startswith("The difference between Nc=1 and IID at J=4 is not significant (")
    assert said[1].startswith(
        "Test accuracy at Nc=1 is 11.20 ± 5.60 points lower with J=16 than with J=4 (significant"
    )


def test_a_row_that_is_itself_a_reference_is_not_picked() -> None:
    start = replace(LOSS, row="head alone", mean=-9.0)
    assert "lower with random" in answer(table(start, LOSS, levels=("head alone",)), RULES)[0]


def test_means_alone_claim_no_order() -> None:
    rows = ["a", "b", "c", "d"]
    cells = [[cell(50.0 + r, [0])] for r, _ in enumerate(rows)]
    grid = Grid("t", "heads", "T", "", "", rows, ["accuracy"], [*cells])
    assert means(grid) == (
        "Test accuracy ranges from 50.00 % for a (1 seed) to 53.00 % for d (1 seed). These means "
        "were not compared by a test."
    )


def test_each_question_with_a_table_has_an_answer_and_tested_ones_come_first() -> None:
    content = rich()
    results = key_results(content, content.chapters[0])
    assert [one.grid for one in results][:2] == ["mask_rules", "six_models"]
    assert len(results) == len({grid.question for grid in content.chapters[0].grids}) + 1
    assert [one.tested for one in results] == [True] + [False] * (len(results) - 1)


def test_a_contrast_of_the_suite_has_the_same_sentence() -> None:
    stated = Answer("Q?", "random", "dense", -1.49, 0.5, 3, -3.0, 0.01, 0.03, [["a"], ["b"]])
    assert statement(stated) == statement(LOSS)
    missing = replace(stated, mean=None, half=None, count=0, p=None, corrected=None)
    assert statement(missing) == "There are no runs yet that compare random with dense"


def test_a_sweep_of_one_run_is_not_called_better() -> None:
    assert scaled(rich().chapters[0].alphas[:1]) == (
        "α = 0.5 has the best validation accuracy for “full fine-tuning, seed 0”. Its test "
        "accuracy is 49.90 %, +0.80 points from the trained model's (1 run; too few seeds to test)."
    )
