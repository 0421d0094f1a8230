"""Contradictions between the files of one run: a sentence for each.

The choice is repeated from the journal and the length counted in it; the result is compared with
the config, the manifest, its own accuracy per class and the records of analyses.
"""

from collections.abc import Iterable
from dataclasses import asdict
from math import isclose
from statistics import fmean

from fedlens.config import compose
from fedlens.config.identity import run_name
from fedlens.config.schema import ROW_KEYS, Config
from fedlens.errors import FedlensError
from fedlens.registry import REGISTRIES
from fedlens.reporting.study.runs import Record, Run, portable_partition, value_of

REPEATED = {  # what manifest and result repeat of the config
    "data": "data.name",
    "backbone": "backbone.name",
    "resolution": "backbone.resolution",
    "seed": "seed",
    "density": "sparse.density",
    "mask_rule": "sparse.rule.name",
    "clients": "federated.clients",
    "local_steps": "federated.local_steps",
    "partition": "partition",
}
ALLOWED = ("validation", "last")  # what a choice may be made on
CHOSEN_BY_ACCURACY = ("alpha", "compose", "merge")  # the others weigh two, or choose nothing


def of_choice(run: Run) -> Iterable[str]:
    choice, unit, select = run.folder.choice, run.result["unit"], run.config["evaluate"]["select"]
    if choice is None:
        yield "its choice was not recorded"
        return
    if choice != run.result["choice"]:
        yield "the choices in choice.json and result.json differ"
    if choice["chosen_on"] not in ALLOWED:
        yield f"it was chosen on {choice['chosen_on']}"
    scores = {r[unit]: r["validation"] for r in run.metrics if "validation" in r}
    right, why = run.result["units"], "the last"
    if select == "best" and scores:
        right, why = max(scores, key=lambda n: (scores[n]["top1"], -n)), "the best on validation"
    if right != choice["unit"]:
        yield f"{unit} {right} was {why}, but {unit} {choice['unit']} was tested"
    if run.result["validation"] != scores.get(choice["unit"]):
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
    """Epochs or rounds of the config that the journal lacks, unless the run stopped early."""
    federated = run.config["federated"]
    planned = run.config["train"]["epochs"]
    if federated["clients"] is not None:
        auto = -(-federated["local_step_budget"] // federated["local_steps"])
        planned = auto if federated["rounds"] == "auto" else federated["rounds"]
    done = sum("train" in record for record in run.metrics)
    if done != planned and not (done < planned and run.config["train"]["early_stopping"]):
        yield f"{done} of {planned} {run.result['unit']}s are in its journal"


def of_name(run: Run) -> Iterable[str]:
    """A run's name ends in a hash of its config, unless the config names the run."""
    config = run.folder.read_config()
    if _has_outside_rows(config):  # their parts of the name are only known with their code
        return
    if config["run"]["name"] is None and _has_all_keys(config, asdict(Config())):
        try:
            expected = run_name(compose.load(run.folder.config))
        except FedlensError as error:
            yield f"its config is invalid ({error})"
        else:
            if expected != run.name:
                yield "its name does not belong to its config"


def _has_outside_rows(config: Record) -> bool:
    rows = {kind: value_of(config, key) for key, kind in ROW_KEYS.items()}
    return any(isinstance(row, dict) and row.get("name") not in REGISTRIES[kind]
               for kind, row in rows.items())  # fmt: skip


def _has_all_keys(config: Record, schema: Record) -> bool:
    return config.keys() == schema.keys() and all(
        _has_all_keys(config[key], value)
        for key, value in schema.items()
        if isinstance(value, dict)
    )


def of_result(run: Run) -> Iterable[str]:
    """Contradictions between config, manifest, journal, result and analyses."""
    if run.metrics[-1].get(run.result["unit"]) != run.result["units"]:
        yield "its journal and its result end at different units"
    expected = {name: value_of(run.config, key) for name, key in REPEATED.items()}
    expected["partition"] = portable_partition(run.config["partition"])
    for name, record in (("manifest", run.manifest), ("result", run.result)):
        wrong = [key for key in expected if key in record and record[key] != expected[key]]
        if wrong:
            yield f"its {name} and its config differ in {', '.join(wrong)}"
    if run.manifest.get("labels", run.labels) != run.labels:
        yield "its manifest and its result have different labels"
    if not _adds_up(run.result["test"]):
        yield "its test accuracy is not the mean over classes"
    for record in run.analyses:
        recorded = record.get("as_trained", run.result)["test"]["top1"]
        if recorded != run.result["test"]["top1"]:
            yield f"its {record['kind']} analysis has a different test accuracy"


def _adds_up(test: Record) -> bool:
    """Whether top-1 is the mean over classes; checked only if classes may have equal sizes."""
    known = [share for share in test["per_class"] if share is not None]
    size = test["count"] / len(known)
    even = all(isclose(share * size, round(share * size), abs_tol=1e-3) for share in known)
    return not even or isclose(fmean(known), test["top1"], abs_tol=1e-5)
