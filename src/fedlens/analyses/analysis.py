"""An edited model is measured like a trained one: candidates, a choice on validation, one test.

Every analysis has a folder below its run, arithmetic/<name>/, with choice.json, written before the
test split is opened, and record.json. A finished one is read, not repeated, so test accuracy is
reported once, for one choice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from fedlens import params
from fedlens.analyses.loaded_run import OpenedRun
from fedlens.data.splits import Choice
from fedlens.errors import FedlensError
from fedlens.files import read_json, write_json
from fedlens.params import Params
from fedlens.store.analysis_records import Record, place, result_of
from fedlens.training.evaluate import Evaluation, NotFinite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """What distinguishes it, and its parameters, made when they are needed."""

    told: Record
    parameters: Callable[[], Params]


@dataclass(frozen=True)
class Analysis:
    """What is asked: the folder's name, what every record of it says, and how to read the rows.

    `pick` chooses among the candidates' rows; `remarks` are added to whatever is measured, and
    `summary` to the record.
    """

    name: str
    about: Record
    pick: Callable[[Sequence[Record]], int]
    unit: int  # the epoch or round of the model that is edited
    remarks: Callable[[Evaluation], Record] = lambda found: {}
    summary: Callable[[Sequence[Record]], Record] = lambda rows: {}
    told: bool = False  # the edit was told, not chosen


def most_accurate(rows: Sequence[Record]) -> int:
    """On validation; of equals the first."""
    return max(range(len(rows)), key=lambda place: rows[place]["validation"]["top1"])


def carry_out(opened: OpenedRun, asked: Analysis, candidates: Sequence[Candidate]) -> Record:
    """Validates every candidate, picks one, and opens the test split for it.

    A candidate whose loss is not finite is left out, and the record says so.
    """
    rows: list[Record] = []
    left_out: list[Record] = []
    for candidate in candidates:
        said = ", ".join(f"{key} {value}" for key, value in candidate.told.items())
        try:
            found = opened.validated(candidate.parameters())
        except NotFinite:
            log.warning("%s: left out, its loss is not finite", said)
            left_out.append(candidate.told)
            continue
        rows.append({**candidate.told, "validation": found.metrics(), **asked.remarks(found)})
        log.info("%s: validation accuracy %.2f %%", said, 100 * found.top1)
    if not rows:
        raise FedlensError("No candidate has a finite loss: try smaller ones.")
    kept = [candidate for candidate in candidates if candidate.told not in left_out]
    chosen = asked.pick(rows)
    edited = kept[chosen].parameters()
    result = result_of(opened.folder)
    choice = Choice(params.digest(edited), "last" if asked.told else "validation", asked.unit)
    where = place(opened.folder, asked.name)
    if (where / "choice.json").exists() and read_json(where / "choice.json") != asdict(choice):
        raise FedlensError(
            f"{where} was begun with another choice, whose test accuracy may have been seen: look "
            "at it, and remove the folder if it has not."
        )
    write_json(where / "choice.json", asdict(choice))
    opened.assign(edited)
    test = opened.measure.test(choice)
    record = {
        **asked.about,
        "run": opened.folder.name,
        "candidates": rows,
        **({"left_out": left_out} if left_out else {}),
        "chosen": chosen,
        "choice": asdict(choice),
        "test": {**asdict(test), **asked.remarks(test)},
        "as_trained": {
            "unit": result["choice"]["unit"],
            "validation": result["validation"],
            "test": {**result["test"], **asked.remarks(Evaluation(**result["test"]))},
        },
        **asked.summary(rows),
    }
    write_json(where / "record.json", record)
    return record
