"""A suite's records as Markdown: test accuracy of its cells, and answers to its contrasts.

Test top-1 in %, mean ± 95 % t-interval over seeds; the number of seeds is in brackets. The effect
size is a difference in standard deviations between seeds. p-values are corrected over all contrasts
that the suite states, also those whose runs are missing.

    python results/suite_table.py SUITE RECORDS
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedlens.reporting.study import contrasts, runs
from fedlens.reporting.study.content import Answer
from fedlens.reporting.study.statistics import estimate
from fedlens.store.run_folder import RunFolder
from fedlens.store.run_folder import runs as folders
from fedlens.suites.plan import folder_of
from fedlens.suites.suite import SLASH, find

Accuracies = dict[tuple[str, str], list[float]]  # row and column → test accuracy in %, by seed


def accuracies(suite: str, records: Path) -> Accuracies:
    """Of the suite's cells that have finished runs, in the suite's order."""
    found: dict[str, RunFolder] = {run.name: run for run in folders(records)}
    cells: Accuracies = {}
    for cell in find(suite).cells():
        run = found.get(folder_of(cell.config).name)
        if run is not None and run.result and "test" in run.result:
            row = SLASH.join(filter(None, (cell.section, cell.row)))
            cells.setdefault((row, cell.column), []).append(100 * run.result["test"]["top1"])
    return cells


def table(cells: Accuracies) -> Iterator[str]:
    columns = list(dict.fromkeys(column for _, column in cells))
    yield _line(["test top-1 in %", *columns])
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
        effect = "" if one.effect is None else f"{one.effect:+.1f}".replace("-", "−")
        difference = f"{one.mean:+.2f}{half}".replace("-", "−")
        yield _line([one.question, difference, effect, str(one.count), _p_value(one.corrected)])


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
    given = parser.parse_args()
    lines = [*table(accuracies(given.suite, given.records)), ""]
    lines += answer_table(answers(given.suite, given.records))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
