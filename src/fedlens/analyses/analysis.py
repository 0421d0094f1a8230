"""An edited model is measured like a trained one: candidates, a choice on validation, one test.

An analysis writes to arithmetic/<name>/ in the folder of its run: choice.json before the test split
is opened, then record.json. A finished analysis is read, not repeated: one test per choice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from fedlens import params
from fedlens.data.splits import Choice
from fedlens.errors import FedlensError
from fedlens.experiments.loaded_run import LoadedRun
from fedlens.params import Params
from fedlens.store.analysis_records import Record, analysis_folder, require_result
from fedlens.store.records import read_record, write_record
from fedlens.training.evaluate import Evaluation, NotFinite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """The settings that distinguish it, and a function that computes its parameters."""

    settings: Record
    parameters: Callable[[], Params]


@dataclass(frozen=True)
class Analysis:
    """The name of its folder, what its record begins with, and how its candidates are compared.

    `choose` picks one of the candidates' rows; `metrics` adds to every evaluation, and `summary` to
    the record.
    """

    name: str
    record: Record
    choose: Callable[[Sequence[Record]], int]
    unit: int  # the epoch or round of the model that is edited
    metrics: Callable[[Evaluation], Record] = lambda evaluation: {}
    summary: Callable[[Sequence[Record]], Record] = lambda rows: {}
    requested: bool = False  # the user requested this edit: nothing is chosen on validation


def most_accurate(rows: Sequence[Record]) -> int:
    """The row with the highest validation accuracy; the first of equal ones."""
    return max(range(len(rows)), key=lambda place: rows[place]["validation"]["top1"])


def choose_and_test(run: LoadedRun, analysis: Analysis, candidates: Sequence[Candidate]) -> Record:
    """Validate all candidates, choose one, and open the test split for it.

    A candidate whose loss is not finite is left out and listed in the record.
    """
    rows: list[Record] = []
    left_out: list[Record] = []
    for candidate in candidates:
        text = ", ".join(f"{key} {value}" for key, value in candidate.settings.items())
        try:
            evaluation = run.validate(candidate.parameters())
        except NotFinite:
            log.warning("%s is left out: its loss is not finite", text)
            left_out.append(candidate.settings)
            continue
        metrics = {"validation": evaluation.metrics(), **analysis.metrics(evaluation)}
        rows.append({**candidate.settings, **metrics})
        log.info("%s: validation accuracy %.2f %%", text, 100 * evaluation.top1)
    if not rows:
        raise FedlensError("No candidate has a finite loss: choose smaller scales.")
    finite = [candidate for candidate in candidates if candidate.settings not in left_out]
    chosen = analysis.choose(rows)
    edited = finite[chosen].parameters()
    result = require_result(run.folder)
    rule: Literal["last", "validation"] = "last" if analysis.requested else "validation"
    choice = Choice(params.digest(edited), rule, analysis.unit)
    folder = analysis_folder(run.folder, analysis.name)
    path = folder / "choice.json"
    if path.exists() and read_record(path) != asdict(choice):
        raise FedlensError(
            f"{folder} holds a different choice, whose test accuracy may have been seen: remove "
            "the folder if it was not."
        )
    write_record(path, asdict(choice))
    run.assign(edited)
    test = run.evaluator.test(choice)
    record = {
        **analysis.record,
        "run": run.folder.name,
        "candidates": rows,
        **({"left_out": left_out} if left_out else {}),
        "chosen": chosen,
        "choice": asdict(choice),
        "test": {**asdict(test), **analysis.metrics(test)},
        "as_trained": {
            "unit": result["choice"]["unit"],
            "validation": result["validation"],
            "test": {**result["test"], **analysis.metrics(Evaluation(**result["test"]))},
        },
        **analysis.summary(rows),
    }
    write_record(folder / "record.json", record)
    return record
