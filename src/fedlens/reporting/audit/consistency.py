"""Where the files of one run contradict each other, or what it was told: a sentence for each.

A choice is made again from the journal, a length is counted in it, a result is held against the
config, the manifest, its own classes and what analyses remember of it.
"""

from collections.abc import Iterable
from dataclasses import asdict
from math import isclose
from statistics import fmean
from typing import Any

import yaml

from fedlens.config import compose
from fedlens.config.identity import run_name
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.reporting.study.runs import Record, Run, value_of

NAMED = {  # what manifest and result repeat of the config
    "data": "data.name",
    "backbone": "backbone.name",
    "resolution": "backbone.resolution",
    "seed": "seed",
    "density": "sparse.density",
    "mask_rule": "sparse.rule",
    "clients": "federated.clients",
    "local_steps": "federated.local_steps",
    "algorithm": "algorithm.name",
    "partition": "partition",
}
ALLOWED = ("validation", "last")  # what a choice may be made on
CHOSEN_BY_ACCURACY = ("alpha", "compose", "merge")  # the others weigh two accuracies, or are told


def of_choice(run: Run) -> Iterable[str]:
    choice, unit, select = run.folder.choice, run.result["unit"], run.config["evaluate"]["select"]
    if choice is None:
        yield "there is no record of its choice"
        return
    if choice != run.result["choice"]:
        yield "the result is of another choice than the one on record"
    if choice["chosen_on"] not in ALLOWED:
        yield f"it was chosen on {choice['chosen_on']}"
    seen = {r[unit]: r["validation"] for r in run.metrics if "validation" in r}
    right, why = run.result["units"], "the last"
    if select == "best" and seen:
        right, why = max(seen, key=lambda n: (seen[n]["top1"], -n)), "best on validation"
    if right != choice["unit"]:
        yield f"{unit} {right} was {why}, {unit} {choice['unit']} met the test split"
    if run.result["validation"] != seen.get(choice["unit"]):
        yield "its result and its journal differ in validation accuracy"


def of_analysis(record: Record) -> Iterable[str]:
    kind = record["kind"]
    if (on := record.get("choice", {}).get("chosen_on", "last")) not in ALLOWED:
        yield f"its {kind} was chosen on {on}"
    if kind in CHOSEN_BY_ACCURACY:
        scores = [row["validation"]["top1"] for row in record["candidates"]]
        if scores[record["chosen"]] != max(scores):
            yield f"its {kind} is not the best on validation"


def of_length(run: Run) -> Iterable[str]:
    """Epochs or rounds that the config asks for and the journal lacks, without an early stop."""
    told = run.config["federated"]
    asked = run.config["train"]["epochs"]
    if told["clients"] is not None:
        auto = -(-told["local_step_budget"] // told["local_steps"])
        asked = auto if told["rounds"] == "auto" else told["rounds"]
    done = sum("train" in record for record in run.metrics)
    if done != asked and not (done < asked and run.config["train"]["early_stopping"]):
        yield f"{done} of {asked} {run.result['unit']}s are in its journal"


def of_name(run: Run) -> Iterable[str]:
    """A run's name ends in a hash of its config, unless a name was told or keys were fewer then."""
    told = yaml.safe_load(run.folder.config.read_text(encoding="utf-8"))
    if told["run"]["name"] is None and _whole(told, asdict(Config())):
        try:
            named = run_name(compose.load(run.folder.config))
        except FedlensError as error:
            yield f"its config is refused ({error})"
        else:
            if named != run.name:
                yield "its config is not the one it was named by"


def _whole(told: Record, schema: Record) -> bool:
    return told.keys() == schema.keys() and all(
        _whole(told[key], value) for key, value in schema.items() if isinstance(value, dict)
    )


def of_result(run: Run) -> Iterable[str]:
    """Where a run's files contradict each other."""
    if run.metrics[-1].get(run.result["unit"]) != run.result["units"]:
        yield "its journal does not end where its result does"
    told = {name: value_of(run.config, key) for name, key in NAMED.items()}
    for name, record in (("manifest", run.manifest), ("result", run.result)):
        other = [key for key in told if key in record and not _agree(record[key], told[key])]
        if other:
            yield f"its {name} and its config differ in {', '.join(other)}"
    if not _adds_up(run.result["test"]):
        yield "its test accuracy is not the mean over classes"
    for record in run.analyses:
        remembered = record.get("as_trained", run.result)["test"]["top1"]
        if remembered != run.result["test"]["top1"]:
            yield f"its {record['kind']} remembers another test accuracy"


def _agree(found: Any, told: Any) -> bool:
    """Groups of keys agree in those that were known when the record was written."""
    if isinstance(found, dict):
        return all(told.get(key) == value for key, value in found.items())
    return bool(found == told)


def _adds_up(test: Record) -> bool:
    """Whether top-1 is the mean over classes; told only of classes that may be of one size."""
    known = [share for share in test["per_class"] if share is not None]
    size = test["count"] / len(known)
    even = all(isclose(share * size, round(share * size), abs_tol=1e-3) for share in known)
    return not even or isclose(fmean(known), test["top1"], abs_tol=1e-5)
