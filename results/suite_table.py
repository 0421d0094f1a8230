"""A suite's records as Markdown: test accuracy of its cells, and answers to its contrasts.

Test top-1 in %, mean ± 95 % t-interval over seeds; the number of seeds is in brackets. The effect
size is a difference in standard deviations between seeds. p-values are corrected over all contrasts
that the suite states, also those whose runs are missing.

    python results/suite_table.py SUITE RECORDS                    all cells, all answers
    python results/suite_table.py SUITE RECORDS --short            the rows of the README
    python results/suite_table.py SUITE RECORDS --figure FILE.png  these as a figure
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

from fedlens.reporting.study import contrasts, runs
from fedlens.reporting.study.content import Answer
from fedlens.reporting.study.statistics import Estimate, estimate
from fedlens.store.run_folder import RunFolder
from fedlens.store.run_folder import runs as folders
from fedlens.suites.plan import folder_of
from fedlens.suites.suite import SLASH, find

Accuracies = dict[tuple[str, str], list[float]]  # row and column → test accuracy in %, by seed

COLUMNS = ("IID", "Nc=50", "Nc=10", "Nc=5", "Nc=1")  # partitions, wherever labels have them
SHORT_COLUMNS = {"IID": "IID data", "Nc=1": "one class per client (Nc=1)"}
SHORT = {  # the README's rows → those of the suite cifar100
    "Closed-form head on the class token, no training": "closed-form heads / class token",
    "Closed-form head on 12 blocks, no training": "closed-form heads / 12 blocks",
    "Linear head trained, backbone frozen": "trained heads / J=4",
    "FedAvg, linear head trained jointly": "linear head trained jointly / J=4",
    "FedAvg, closed-form head frozen": "FedAvg / J=4",
    "FedAvg of a random 10 % of the weights": "mask rules / random",
    "FedAvg of the least sensitive 10 % (TaLoS)": "mask rules / least sensitive",
    "Cyclic FedAvg, head solved again": "averaging, head solved again every cycle / dense",
    "Chain of clients, head solved again": "chain, head solved again every cycle / dense",
    "Chain of short visits, random 40 % of the weights, head solved again": (
        "chain of short visits, head solved again every cycle / random 40 %"
    ),
}
ROW = 0.35  # of the figure, in inches


def accuracies(suite: str, records: Path) -> Accuracies:
    """Of the suite's cells that have finished runs, in the suite's order."""
    found: dict[str, RunFolder] = {run.name: run for run in folders(records)}
    cells: Accuracies = {}
    for cell in find(suite).cells():
        run = found.get(folder_of(cell.config).name)
        if run is not None and run.result and "test" in run.result:
            cells.setdefault(_place(cell.label), []).append(100 * run.result["test"]["top1"])
    return cells


def _place(label: str) -> tuple[str, str]:
    parts = label.split(SLASH)
    columns = [part for part in parts if part in COLUMNS]
    return SLASH.join(part for part in parts if part not in COLUMNS), "".join(columns)


def short(cells: Accuracies) -> Accuracies:
    """The README's rows, as far as they have runs."""
    return {
        (label, column): cells[row, column]
        for label, row in SHORT.items()
        for column in SHORT_COLUMNS
        if (row, column) in cells
    }


def draw(cells: Accuracies, target: Path) -> None:
    """The README's rows: accuracy on IID data and with one class per client, joined by a line."""
    from fedlens.reporting.figures import style

    if not short(cells):
        raise SystemExit("These records have no runs of the README's rows.")
    rows: dict[str, dict[str, Estimate]] = {}
    for (label, column), values in short(cells).items():
        rows.setdefault(label, {})[column] = estimate(values)
    names = [fill(label, 46) for label in rows]
    with style.paper():
        left = max(map(style.text_width, names)) + 0.12
        figure, ((axes,),) = style.panels(
            1, 1, width=style.TEXT, height=ROW * len(rows), left=left, top=0.3
        )
        for place, row in enumerate(rows.values()):
            means = [accuracy.mean for accuracy in row.values()]
            axes.plot(means, [place] * len(means), color=style.GREY, linewidth=0.8, zorder=1)
        for (column, label), look in zip(SHORT_COLUMNS.items(), style.LOOKS, strict=False):
            tests = {place: row[column] for place, row in enumerate(rows.values()) if column in row}
            axes.errorbar(
                [test.mean for test in tests.values()],
                list(tests),
                xerr=[test.half or 0 for test in tests.values()],
                fmt=look.marker,
                color=look.colour,
                capsize=2,
                label=label,
            )
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("test accuracy [%]")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        style.plain(axes, "x")
        style.save(figure, target)


def table(cells: Accuracies) -> Iterator[str]:
    found = {column for _, column in cells}
    columns = [column for column in (*COLUMNS, "") if column in found]
    yield _line(["test top-1 in %", *(column or "other" for column in columns)])
    yield _line(["---"] * (1 + len(columns)))
    for row in dict.fromkeys(row for row, _ in cells):
        yield _line([row, *(_number(cells.get((row, column), [])) for column in columns)])


def answers(suite: str, records: Path) -> list[Answer]:
    """To the contrasts for which there are runs."""
    found = contrasts.answers(contrasts.asked(find(suite)), runs.read([records]))
    return [answer for answer in found if answer.mean is not None]


def answer_table(answered: Sequence[Answer]) -> Iterator[str]:
    yield _line(["question", "difference", "effect size", "seeds", "p"])
    yield _line(["---"] * 5)
    for one in answered:
        assert one.mean is not None
        half = "" if one.half is None else f" ± {one.half:.2f}"
        effect = "" if one.effect is None else _signed(one.effect, 1)
        difference = _signed(one.mean, 2) + half
        yield _line([one.question, difference, effect, str(one.count), _p_value(one.corrected)])


def _signed(value: float, decimals: int) -> str:
    """Without a sign where it is rounded to 0."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def _p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _number(values: Sequence[float]) -> str:
    if not values:
        return ""
    accuracy = estimate(values)
    half = "" if accuracy.half is None else f" ± {accuracy.half:.2f}"
    return f"{accuracy.mean:.2f}{half} ({accuracy.count})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Records of a suite as Markdown.")
    parser.add_argument("suite")
    parser.add_argument("records", type=Path)
    parser.add_argument("--short", action="store_true", help="only the rows of the README")
    parser.add_argument("--figure", type=Path, help="draw the rows of the README into this file")
    given = parser.parse_args()
    cells = accuracies(given.suite, given.records)
    if given.figure:
        draw(cells, given.figure)
    if given.short:
        lines = [*table(short(cells))]
    else:
        lines = [*table(cells), "", *answer_table(answers(given.suite, given.records))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
