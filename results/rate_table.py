"""Trials of a suite as Markdown: validation accuracy at every learning rate, the best in bold.

Top-1 in % after the last round, one seed. A row has the trials that differ in their learning rate
alone.

    python results/rate_table.py SUITE RECORDS --only TEXT [--only TEXT ...]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedlens.store.run_folder import runs
from fedlens.suites.plan import folder_of
from fedlens.suites.suite import SLASH, find, only

Trials = dict[str, dict[float, float]]  # section and column → learning rate → accuracy in %


def trials(suite: str, records: Path, texts: Sequence[str] = ()) -> Trials:
    """Of the suite's cells that have finished, in the suite's order."""
    found = {run.name: run.result for run in runs(records)}
    tried: Trials = {}
    for cell in only(find(suite).cells(), texts):
        if result := found.get(folder_of(cell.config).name):
            label = SLASH.join(filter(None, (cell.section, cell.column)))
            rates, rate = tried.setdefault(label, {}), cell.config.train.lr
            if rate in rates:
                raise SystemExit(f"{label} has trials of several methods, at the same {rate:g}.")
            rates[rate] = round(100 * result["validation"]["top1"], 2)
    return tried


def table(tried: Trials) -> Iterator[str]:
    yield "| trials | learning rate: validation top-1 in % |"
    yield "| --- | --- |"
    for label, rates in tried.items():
        best = max(rates, key=lambda rate: rates[rate])
        cells = [f"{rate:g}: {rates[rate]:.2f}" for rate in sorted(rates)]
        marked = [
            f"**{cell}**" if rate == best else cell
            for rate, cell in zip(sorted(rates), cells, strict=True)
        ]
        yield f"| {label} | {', '.join(marked)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of a suite as Markdown.")
    parser.add_argument("suite")
    parser.add_argument("records", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    given = parser.parse_args()
    tried = trials(given.suite, given.records, given.only)
    sys.stdout.write("\n".join(table(tried)) + "\n")


if __name__ == "__main__":
    main()
