"""From a study to what a report says of it: tables, curves, masks, analyses, provenance."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from fedlens.config import compose
from fedlens.config.checks import validate
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.reporting.audit.checks import audit
from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import Comparison
from fedlens.reporting.study.content import (
    About,
    AlphaCurve,
    Chapter,
    Content,
    CurveSet,
    Finding,
    Grid,
    MaskMap,
    PartitionPicture,
    Provenance,
)
from fedlens.reporting.study.curves import curve_set
from fedlens.reporting.study.questions import comparisons, six_models
from fedlens.reporting.study.runs import Method, Record, Run, Settings, Study, value_of
from fedlens.reporting.terminal.analyses import EQUATIONS, asked, outcome

Schema = TypeVar("Schema")
Named = TypeVar("Named", AlphaCurve, Finding, Grid, MaskMap, PartitionPicture)

FACTS = {  # what the prose may say of the runs' configs
    "clients": "federated.clients",
    "participation": "federated.participation",
    "local_steps": "federated.local_steps",
    "batch_size": "train.batch_size",
    "momentum": "train.momentum",
    "weight_decay": "train.weight_decay",
    "validation": "data.validation",
    "lr": "train.lr",
    "schedule": "train.schedule.name",
    "density": "sparse.density",
    "calibration_source": "sparse.source",
    "calibration_examples": "sparse.examples",
    "calibration_rounds": "sparse.rounds",
    "epochs": "train.epochs",
}
OF_CALIBRATION = ("sparse.rounds", "sparse.source", "sparse.examples")


def content(study: Study, about: About) -> Content:
    tables: list[Comparison] = []
    chapters = []
    for number, (setting, methods) in enumerate(study.settings.items()):
        six = six_models(methods, about.noniid)
        mine = [
            replace(table, grid=_of_setting(number, table.grid))
            for table in [*([six] if six else []), *comparisons(methods)]
        ]
        grids = [table.grid for table in mine]
        tables += mine
        chapters.append(
            Chapter(
                setting=setting,
                headline=grids[0] if six else None,
                grids=grids[1:] if six else grids,
                curves=_curves(mine),
                masks=[_of_setting(number, one) for one in _masks(methods)],
                alphas=[_of_setting(number, one) for one in _alphas(methods)],
                findings=[_of_setting(number, one) for one in _findings(methods)],
                partitions=[_of_setting(number, one) for one in _partitions(methods)],
                facts=_facts(methods),
            )
        )
    used = {
        name for table in tables for row in table.grid.cells for cell in row if cell
        for name in cell.runs
    }  # fmt: skip
    return Content(
        about=about,
        chapters=chapters,
        audit=audit(study, tables),
        runs=[
            _provenance(run, setting, run.name in used)
            for setting, methods in study.settings.items()
            for method in methods
            for run in method.runs
        ],
        unfinished=study.unfinished,
    )


def _of_setting(number: int, one: Named) -> Named:
    """Under a name that no other setting has, since names are those of files."""
    return replace(one, name=f"{one.name}-setting{number + 1}") if number else one


def _curves(tables: Iterable[Comparison]) -> list[CurveSet]:
    found = (curve_set(table) for table in tables)
    return [one for one in found if one is not None]


def _masks(methods: Sequence[Method]) -> list[MaskMap]:
    """One map for each mask: of runs that share it the first stands for all."""
    found: dict[str, MaskMap] = {}
    for method in methods:
        run = method.runs[0]
        if (record := run.masks) is None or (digest := _digest(run)) in found:
            continue
        layers, kinds = list(record["layers"]), list(record["kinds"])
        label = labels.masked(method)
        found[digest] = MaskMap(
            name=f"mask-{len(found) + 1}",
            label=label,
            trained=record["all"]["trained"],
            total=record["all"]["total"],
            layers=layers,
            kinds=kinds,
            density=[[_share(record["table"], layer, kind) for kind in kinds] for layer in layers],
            run=run.name,
        )
    return list(found.values())


def _digest(run: Run) -> str:
    """Of its masks; an older manifest does not tell it, so such a run stands for itself."""
    return str(run.manifest.get("masks", run.name))


def _share(table: Record, layer: str, kind: str) -> float | None:
    entry = table.get(layer, {}).get(kind)
    return None if entry is None else float(entry["density"])


def _alphas(methods: Iterable[Method]) -> list[AlphaCurve]:
    found: list[AlphaCurve] = []
    for method, run, record in _analysed(methods):
        if record["kind"] != "alpha":
            continue
        rows = record["candidates"]
        found.append(
            AlphaCurve(
                name=f"alpha-{len(found) + 1}",
                label=f"{labels.described(method)}, seed {run.seed}",
                base=record["base"],
                alphas=[row["alpha"] for row in rows],
                accuracy=[100 * row["validation"]["top1"] for row in rows],
                loss=[row["validation"]["loss"] for row in rows],
                chosen=rows[record["chosen"]]["alpha"],
                test=100 * record["test"]["top1"],
                as_trained=100 * record["as_trained"]["test"]["top1"],
                barrier=record.get("barrier"),
                run=run.name,
            )
        )
    return found


def _findings(methods: Iterable[Method]) -> list[Finding]:
    found: list[Finding] = []
    for method, run, record in _analysed(methods):
        if record["kind"] == "alpha":
            continue
        found.append(
            Finding(
                name=f"{record['kind']}-{len(found) + 1}",
                kind=record["kind"],
                label=f"{labels.described(method)}, seed {run.seed}",
                facts=[("what", EQUATIONS[record["kind"]]), *asked(record), *outcome(record)],
                run=run.name,
                record=record,
            )
        )
    return found


def _analysed(methods: Iterable[Method]) -> Iterable[tuple[Method, Run, Record]]:
    for method in methods:
        for run in method.runs:
            for record in run.analyses:
                yield method, run, record


def _partitions(methods: Iterable[Method]) -> list[PartitionPicture]:
    """One for each partition: of the seeds the first stands for all."""
    found: dict[str, PartitionPicture] = {}
    for method in sorted(methods, key=labels.evenness):
        label, run = labels.partition(method), method.runs[0]
        record = run.folder.partition
        if label in found or record is None:
            continue
        told = record["statistics"]
        found[label] = PartitionPicture(
            name=f"partition-{len(found) + 1}",
            label=label,
            clients=told["clients"],
            samples=told["samples"],
            summary=told["summary"],
            histogram=record.get("histogram", []),
            run=run.name,
        )
    return list(found.values())


def _facts(methods: Sequence[Method]) -> dict[str, list[Any]]:
    """Every value found, in order, of the methods that the key says anything of."""
    found: dict[str, list[Any]] = {}
    for name, key in FACTS.items():
        group = key.partition(".")[0]
        asked_of = [
            method for method in methods
            if (group != "federated" or labels.federated(method))
            and (group != "sparse" or labels.sparse(method))
            and (key not in OF_CALIBRATION or labels.calibrates(method))
            and (key != "train.epochs" or not labels.federated(method))
            and (group == "data" or key == "federated.clients" or labels.trains(method))
        ]  # fmt: skip
        values = {value_of(method.config, key) for method in asked_of}
        found[name] = sorted(value for value in values if value is not None)
    solved = {run.result["facts"].get("ridge_lambda") for m in methods for run in m.runs}
    found["ridge_lambda"] = sorted(value for value in solved if value is not None)
    found["seeds"] = sorted({seed for method in methods for seed in method.seeds})
    return found


def _provenance(run: Run, setting: str, used: bool) -> Provenance:
    session = run.manifest["sessions"][0]
    choice = run.result["choice"]
    return Provenance(
        name=run.name,
        setting=setting,
        seed=run.seed,
        command=_command(run),
        commit=session["git"] or "",
        versions=session["versions"],
        device=session["device"],
        threads=session["threads"],
        inputs=run.manifest["inputs"],
        parameters=choice["parameters"],
        chosen=f"{choice['chosen_on']}, {run.result['unit']} {choice['unit']}",
        validation=run.validation,
        test=run.test,
        used=used,
    )


def _command(run: Run) -> str:
    """The words that repeat it; of a config this version does not know, those that made it."""
    try:
        config = _typed(Config, run.config)
        validate(config)
        return shlex.join(compose.command(config))
    except (FedlensError, LookupError, TypeError):
        return str(run.manifest["sessions"][0]["command"])


def _typed(schema: type[Schema], told: Settings) -> Schema:
    """As `compose.load` would read it, many times sooner: the file was written from the schema."""
    kinds = get_type_hints(schema)
    return schema(
        **{k: _typed(kinds[k], v) if is_dataclass(kinds[k]) else v for k, v in told.items()}
    )
