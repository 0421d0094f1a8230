"""Runs as tables in a terminal, from their records alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.errors import FedlensError
from fedlens.reporting.study.labels import CENTRAL, NONE, percent
from fedlens.runtime.units import counted, duration_text, size_text
from fedlens.store.run_folder import RunFolder

SHOWN = 20  # lines of a learning curve
LONGEST_ID = 24  # characters on one line; longer names, which users chose, are folded
LABELS = ("data", "backbone", "partition", "J", "method", "seed")  # columns, where runs differ
METHOD = ("trains", "algorithm", "head")  # labels that make up a run's method, where runs differ
FACTS = {"l2": "ridge penalty λ", "temperature": "head temperature"}  # where a key says too little
COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def runs_table(folders: Sequence[RunFolder]) -> RenderableType:
    """A line for each run: its short id, the labels that differ between runs, and its accuracy.

    What all runs have in common is said once, above. Labels are cut where the terminal is too
    narrow; ids never are, since commands take them.
    """
    lines: dict[RunFolder, _Line] = {}
    errors: dict[RunFolder, FedlensError] = {}
    for folder in folders:
        try:
            with folder.named_in_errors():
                lines[folder] = _line(folder)
        except FedlensError as error:  # show the other runs all the same
            errors[folder] = error
    labels, common = _differing([line.labels for line in lines.values()])
    finished = all(folder in lines and lines[folder].state == "finished" for folder in folders)
    columns = [key for key in LABELS if any(key in one for one in labels)]
    table = Table(box=None, pad_edge=False)
    ids = _ids(folders)
    fits = max(map(len, ids.values()), default=0) <= LONGEST_ID
    table.add_column("run", no_wrap=fits, overflow="fold")
    for column in columns:
        table.add_column(column)
    for column in ([] if finished else ["state"]) + ["val.", "test"]:
        table.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
    by_folder = dict(zip(lines, labels, strict=True))
    for folder in folders:
        line, own = lines.get(folder), by_folder.get(folder, {})
        state = Text("unreadable", "red") if line is None else Text(line.text, COLOURS[line.state])
        table.add_row(
            Text(ids[folder]),
            *(Text(own.get(key, NONE), no_wrap=True, overflow="ellipsis") for key in columns),
            *([] if finished else [state]),
            *((NONE, NONE) if line is None else (line.validation, line.test)),
        )
    count = counted(len(folders), "run")
    if finished:
        count += ", all finished" if len(folders) > 1 else ", finished"
    reasons = [Text(f"{ids[run]}: {error}", "red") for run, error in errors.items()]
    return Group(Text("; ".join([count, *common])), Text(), table, *reasons)


def _ids(folders: Sequence[RunFolder]) -> dict[RunFolder, str]:
    """The short id of each run; its name if another run has the same id."""
    count = Counter(folder.short_id for folder in folders)
    return {
        folder: folder.short_id if count[folder.short_id] == 1 else folder.name
        for folder in folders
    }


@dataclass(frozen=True)
class _Line:
    """What the list of runs says of one."""

    state: str
    text: str  # the state, and how far an unfinished run has come
    labels: Mapping[str, str]
    validation: str
    test: str


def _line(folder: RunFolder) -> _Line:
    state, result, manifest = folder.state(), folder.result, folder.manifest or {}
    last = _last_validation(folder) if result is None else result
    done = counted(folder.position(), manifest.get("unit", "epoch"))
    return _Line(
        state,
        state if result is not None else f"{state} ({done})",
        _labels(manifest),
        percent(last.get("validation")),
        percent(None if result is None else result.get("test")),
    )


def _labels(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a run is; nothing where it has not begun."""
    if not manifest:
        return {}
    trains = _label(manifest, "trainable")
    if "density" in manifest:
        trains = f"{_label(manifest, 'mask_rule')} {100 * manifest['density']:.4g}%"
    federated = "clients" in manifest
    return {
        "experiment": str(manifest.get("experiment", NONE)),
        "data": _label(manifest, "data"),
        "backbone": _backbone(manifest),
        "partition": _label(manifest, "partition") if federated else CENTRAL,
        "J": str(manifest["local_steps"]) if federated else NONE,
        "trains": trains,
        "algorithm": _label(manifest, "algorithm") if federated else "",
        "head": _label(manifest, "head"),
        "seed": str(manifest.get("seed", NONE)),
    }


def _differing(runs: Sequence[Mapping[str, str]]) -> tuple[list[dict[str, str]], list[str]]:
    """The labels of each run that others do not share, by column, and the labels that all share."""
    keys = list(dict.fromkeys(key for run in runs for key in run))
    differ = {key for key in keys if len({run.get(key, NONE) for run in runs}) > 1}
    columns = []
    for run in runs:
        method = [run[key] for key in METHOD if key in differ and run.get(key)]
        own = {key: value for key, value in run.items() if key in differ and key not in METHOD}
        columns.append(own | ({"method": ", ".join(method)} if method else {}))
    named = {"J": "J = {}", "seed": "seed {}"}
    common = [
        named.get(key, "{}").format(runs[0][key])
        for key in keys
        if key not in differ and runs[0].get(key, NONE) not in (NONE, "")
    ]
    return columns, common


def run_page(folder: RunFolder) -> RenderableType:
    """One run: its state, what it trains, its accuracy, where it was run, its learning curve."""
    state, result, manifest = folder.state(), folder.result, folder.manifest
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", Text(folder.name, overflow="fold"))
    facts.add_row("state", Text(state, style=COLOURS[state]))
    if failure := folder.failure:
        facts.add_row("error", Text(failure, style="red"))
    facts.add_row("folder", Text(str(folder.path), overflow="fold"))
    if manifest:
        facts.add_row("data", _label(manifest, "data"))
        facts.add_row("backbone", _backbone(manifest))
        if "density" in manifest:
            rule = _label(manifest, "mask_rule")
            facts.add_row("trains", f"{100 * manifest['density']:.4g}% of the weights: {rule}")
        if "clients" in manifest:
            facts.add_row("federation", _federation(manifest))
    if result:
        _add_result(facts, result)
    if manifest:
        session = manifest["sessions"][-1]
        facts.add_row("started", _started(len(manifest["sessions"])))
        facts.add_row("command", Text(manifest["sessions"][0]["command"], overflow="fold"))
        facts.add_row("commit", session["git"] or "not from a git checkout")
        facts.add_row("device", f"{session['device']}, {counted(session['threads'], 'thread')}")
    if state in ("interrupted", "failed"):
        facts.add_row("resume with", f"fedlens resume {folder.path}")
    return Group(facts, Text(), _curve(folder, (manifest or {}).get("unit", "epoch")))


def _add_result(facts: Table, result: Mapping[str, Any]) -> None:
    choice, test = result["choice"], result.get("test")
    facts.add_row("test accuracy", _tested(test) if test else NONE)
    facts.add_row("validation", f"{percent(result['validation'])} (top-1)")
    facts.add_row("tested", _tested_model(result))
    if clients := result.get("per_client"):
        facts.add_row(
            "client accuracy",
            f"mean {clients['mean']:.2%}, worst tenth of the clients {clients['worst_decile']:.2%}",
        )
    if privacy := result.get("privacy"):
        bound = f"ε = {privacy['epsilon']:.3g} at δ = {privacy['delta']:.0e}"
        facts.add_row("privacy", f"{privacy['kind']}: {bound}")
    facts.add_row("parameters' hash", f"sha256 {choice['parameters'][:16]}…")
    facts.add_row("time", duration_text(result["seconds"]))
    for name, value in result["facts"].items():
        if (
            name != "update_bytes" or result["unit"] == "round"
        ):  # nothing is sent in central training
            facts.add_row(*_measurement(name, value))


def _tested(test: Mapping[str, Any]) -> str:
    images = counted(test["count"], "image")
    return f"{percent(test)} (top-1), {test['top5']:.2%} (top-5) of {images}"


def _tested_model(result: Mapping[str, Any]) -> str:
    """'the model after round 8, chosen on validation'."""
    choice = result["choice"]
    after = f"after {result['unit']} {choice['unit']}" if choice["unit"] else "before training"
    why = "the last one" if choice["chosen_on"] == "last" else f"chosen on {choice['chosen_on']}"
    return f"the model {after}, {why}"


def _measurement(name: str, value: float) -> tuple[str, str]:
    """'update size', '1.9 MB': a fact of the result in words."""
    for ending, word in (("_bytes", " size"), ("_bytes_up", " sent")):
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " ") + word, size_text(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return FACTS.get(name, name.replace("_", " ")), number


def _started(sessions: int) -> str:
    return "once" if sessions == 1 else f"resumed {counted(sessions - 1, 'time')}"


def _label(manifest: Mapping[str, Any], key: str) -> str:
    return str(manifest.get("labels", {}).get(key, NONE))


def _backbone(manifest: Mapping[str, Any]) -> str:
    if "backbone" not in manifest:
        return NONE
    start = "" if manifest["pretrained"] else ", from scratch"
    name = manifest.get("labels", {}).get("backbone", manifest["backbone"])
    return f"{name} at {manifest['resolution']} px{start}"


def _federation(manifest: Mapping[str, Any]) -> str:
    return (
        f"{_label(manifest, 'algorithm')}, {counted(manifest['clients'], 'client')}, "
        f"{counted(manifest['local_steps'], 'local step')}, "
        f"partition {_label(manifest, 'partition')}"
    )


def _curve(folder: RunFolder, unit: str) -> Table:
    """Every record of a short run; of a long one, about twenty of those with a validation."""
    table = Table(box=None, pad_edge=False)
    for column in (unit, "lr", "train loss", "train acc.", "val. loss", "val. acc."):
        table.add_column(column, justify="right")
    records = folder.journal("metrics").read()
    if len(records) > SHOWN:
        records = [record for record in records if "validation" in record] or records
        stride = -(-len(records) // SHOWN)
        records = records[::-1][::stride][::-1]
    for record in records:
        train, validation = record.get("train"), record.get("validation")
        table.add_row(
            str(record[unit]),
            f"{record['lr']:.2e}" if "lr" in record else NONE,
            f"{train['loss']:.3f}" if train else NONE,
            f"{train['accuracy']:.2%}" if train else NONE,
            f"{validation['loss']:.3f}" if validation else NONE,
            percent(validation),
        )
    return table


def _last_validation(folder: RunFolder) -> dict[str, Any]:
    evaluated = [r for r in folder.journal("metrics").read() if "validation" in r]
    return evaluated[-1] if evaluated else {}
