"""From a study to the content of its report: tables, curves, masks, analyses, provenance."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from fedlens import plugins
from fedlens.config import compose
from fedlens.config.checks import check
from fedlens.config.compose import getattr_dotted, row_of
from fedlens.config.schema import ROW_KEYS, Config
from fedlens.errors import FedlensError
from fedlens.registry import RowSettings
from fedlens.reporting.audit.checks import audit
from fedlens.reporting.study import labels
from fedlens.reporting.study.analyses import EQUATIONS, analysis_results, analysis_settings
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
from fedlens.reporting.study.contrasts import Asked, answers, quoted
from fedlens.reporting.study.curves import curve_set
from fedlens.reporting.study.questions import comparisons, questions
from fedlens.reporting.study.runs import Method, Record, Run, Settings, Study, value_of

Schema = TypeVar("Schema")
Named = TypeVar("Named", AlphaCurve, Finding, Grid, MaskMap, PartitionPicture)

FACTS = {  # name in a report → config key
    "clients": "federated.clients",
    "participation": "federated.participation",
    "local_steps": "federated.local_steps",
    "batch_size": "train.batch_size",
    "momentum": "train.optimizer.momentum",
    "weight_decay": "train.optimizer.weight_decay",
    "validation": "data.validation",
    "lr": "train.lr",
    "schedule": "train.schedule.name",
    "density": "sparse.density",
    "calibration_source": "sparse.source",
    "calibration_examples": "sparse.examples",
    "calibration_rounds": "sparse.rounds",
    "epochs": "train.epochs",
}
CALIBRATION_KEYS = ("sparse.rounds", "sparse.source", "sparse.examples")


def content(study: Study, about: About, asked: Sequence[Asked] = ()) -> Content:
    """`asked` are the contrasts that the study's suite stated before its runs."""
    all_questions = questions()
    answered = answers(asked, study)
    headlines = {one.name for one in all_questions if one.headline}
    tables: list[Comparison] = []
    chapters = []
    for number, (setting, methods) in enumerate(study.settings.items()):
        mine = [
            replace(table, grid=_of_setting(number, table.grid))
            for table in comparisons(methods, about)
        ]
        if answered:
            mine = [replace(table, grid=quoted(table.grid, answered)) for table in mine]
        grids = [table.grid for table in mine]
        headline = next((grid for grid in grids if grid.question in headlines), None)
        tables += mine
        chapters.append(
            Chapter(
                setting=setting,
                headline=headline,
                grids=[grid for grid in grids if grid is not headline],
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
        questions=all_questions,
        chapters=chapters,
        audit=audit(study, tables, all_questions),
        runs=[
            _provenance(run, setting, run.name in used)
            for setting, methods in study.settings.items()
            for method in methods
            for run in method.runs
        ],
        unfinished=study.unfinished,
        asked=answered,
    )


def _of_setting(number: int, one: Named) -> Named:
    """With a name that no other setting has: names are those of files."""
    return replace(one, name=f"{one.name}-setting{number + 1}") if number else one


def _curves(tables: Iterable[Comparison]) -> list[CurveSet]:
    sets = (curve_set(table) for table in tables)
    return [one for one in sets if one is not None]


def _masks(methods: Sequence[Method]) -> list[MaskMap]:
    """One map per mask, from the first of the runs that share it."""
    maps: dict[str, MaskMap] = {}
    for method in methods:
        run = method.runs[0]
        if (record := run.masks) is None or (digest := run.manifest["masks"]) in maps:
            continue
        layers, kinds = list(record["layers"]), list(record["kinds"])
        maps[digest] = MaskMap(
            name=f"mask-{len(maps) + 1}",
            rule=labels.rule(method),
            label=labels.mask(method),
            trained=record["all"]["trained"],
            total=record["all"]["total"],
            layers=layers,
            kinds=kinds,
            density=[[_share(record["table"], layer, kind) for kind in kinds] for layer in layers],
            run=run.name,
        )
    return list(maps.values())


def _share(table: Record, layer: str, kind: str) -> float | None:
    entry = table.get(layer, {}).get(kind)
    return None if entry is None else float(entry["density"])


def _alphas(methods: Iterable[Method]) -> list[AlphaCurve]:
    curves: list[AlphaCurve] = []
    for method, run, record in _analysed(methods):
        if record["kind"] != "alpha":
            continue
        rows = record["candidates"]
        curves.append(
            AlphaCurve(
                name=f"alpha-{len(curves) + 1}",
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
    return curves


def _findings(methods: Iterable[Method]) -> list[Finding]:
    findings: list[Finding] = []
    for method, run, record in _analysed(methods):
        if record["kind"] == "alpha":
            continue
        findings.append(
            Finding(
                name=f"{record['kind']}-{len(findings) + 1}",
                kind=record["kind"],
                label=f"{labels.described(method)}, seed {run.seed}",
                facts=[
                    ("model", EQUATIONS[record["kind"]]),
                    *analysis_settings(record),
                    *analysis_results(record),
                ],
                run=run.name,
                record=record,
            )
        )
    return findings


def _analysed(methods: Iterable[Method]) -> Iterable[tuple[Method, Run, Record]]:
    for method in methods:
        for run in method.runs:
            for record in run.analyses:
                yield method, run, record


def _partitions(methods: Iterable[Method]) -> list[PartitionPicture]:
    """One picture per partition, of its first seed, from even to skewed."""
    pictures: dict[str, PartitionPicture] = {}
    for method in sorted(methods, key=labels.partition_order):
        label, run = labels.partition(method), method.runs[0]
        record = run.partition
        if label in pictures or record is None:
            continue
        statistics = record["statistics"]
        pictures[label] = PartitionPicture(
            name=f"partition-{len(pictures) + 1}",
            label=label,
            clients=statistics["clients"],
            samples=statistics["samples"],
            summary=statistics["summary"],
            histogram=record.get("histogram", []),
            run=run.name,
        )
    return list(pictures.values())


def _facts(methods: Sequence[Method]) -> dict[str, list[Any]]:
    """Every value of these keys, sorted, over the methods on which the key has an effect."""
    facts: dict[str, list[Any]] = {}
    for name, key in FACTS.items():
        group = key.partition(".")[0]
        concerned = [
            method for method in methods
            if (group != "federated" or labels.federated(method))
            and (group != "sparse" or labels.sparse(method))
            and (key not in CALIBRATION_KEYS or labels.calibrates(method))
            and (key != "train.epochs" or not labels.federated(method))
            and (group == "data" or key == "federated.clients" or labels.trains(method))
        ]  # fmt: skip
        values = {value_of(method.config, key) for method in concerned}
        facts[name] = sorted(value for value in values if value is not None)
    solved = {run.result["facts"].get("l2") for m in methods for run in m.runs}
    facts["l2"] = sorted(value for value in solved if value is not None)
    facts["seeds"] = sorted({seed for method in methods for seed in method.seeds})
    return facts


def _provenance(run: Run, setting: str, used: bool) -> Provenance:
    session = run.manifest["sessions"][0]
    choice = run.result["choice"]
    why = "the last" if choice["chosen_on"] == "last" else f"chosen on {choice['chosen_on']}"
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
        chosen=f"{run.result['unit']} {choice['unit']}, {why}",
        validation=run.validation,
        test=run.test,
        used=used,
    )


def _command(run: Run) -> str:
    """The command that repeats it; for a config this version does not know, the one that ran it."""
    try:
        with plugins.only_loaded():  # a report runs no code of a plugin
            config = _with_defaults(_typed(Config, run.config))
            check(config)
            return shlex.join(compose.command(config))
    except (FedlensError, LookupError, TypeError):
        return str(run.manifest["sessions"][0]["command"])


def _with_defaults(config: Config) -> Config:
    """The config with the parameters that its rows have got since it was written."""
    for key in ROW_KEYS:
        *path, last = key.split(".")
        section = getattr_dotted(config, ".".join(path)) if path else config
        chosen = getattr(section, last)
        defaults = row_of(config, key).defaults
        setattr(section, last, RowSettings({"name": chosen["name"], **defaults, **chosen}))
    return config


def _typed(schema: type[Schema], values: Settings) -> Schema:
    """As `compose.load` reads it, but much faster: the file was written from the schema."""
    types = get_type_hints(schema)
    return schema(
        **{
            key: _typed(types[key], value) if is_dataclass(types[key])
            else RowSettings({"name": value["name"], **value}) if isinstance(value, dict) else value
            for key, value in values.items()
        }
    )  # fmt: skip
