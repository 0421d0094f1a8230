"""Runs as tables in a terminal, from their records alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.errors import FedlensError
from fedlens.reporting.study.statistics import estimate
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import position
from fedlens.suites.suite import Cell

SHOWN = 20  # lines of a learning curve
COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def runs_table(folders: Iterable[RunFolder]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("run", "data", "backbone", "state", "done", "validation", "test"):
        right = column in ("done", "validation", "test")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for folder in folders:
        try:
            table.add_row(*_row(folder))
        except (FedlensError, KeyError, TypeError) as error:  # one broken run hides no other
            table.add_row(folder.name, "", "", Text(f"unreadable: {error}", style="red"))
    return table


def _row(folder: RunFolder) -> list[RenderableType]:
    state, result, signed = folder.state(), folder.result, folder.manifest or {}
    last = _last_validation(folder) if result is None else result
    return [
        folder.name,
        signed.get("data", "–"),
        _backbone(signed),
        Text(state, style=COLOURS[state]),
        _counted(signed, position(folder) if result is None else result["units"]),
        percent(last.get("validation")),
        percent(None if result is None else result.get("test")),
    ]


def run_page(folder: RunFolder) -> RenderableType:
    """All one wants to know of a run at a glance."""
    state, result, signed = folder.state(), folder.result, folder.manifest
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", Text(folder.name, overflow="fold"))
    facts.add_row("state", Text(state, style=COLOURS[state]))
    if failure := folder.failure:
        facts.add_row("why", Text(failure, style="red"))
    facts.add_row("folder", Text(str(folder.path), overflow="fold"))
    if signed:
        facts.add_row("data", signed["data"])
        facts.add_row("backbone", _backbone(signed))
        if "density" in signed:
            rule = signed["mask_rule"].replace("_", " ")
            facts.add_row("trained", f"{signed['density']:.4g} of the weights: {rule}")
        if "clients" in signed:
            facts.add_row("federation", _federation(signed))
    if result:
        choice, test = result["choice"], result.get("test")
        facts.add_row("test", _tested(test) if test else "–")
        facts.add_row("validation", f"top-1 {percent(result['validation'])}")
        facts.add_row("chosen on", f"{choice['chosen_on']}, {result['unit']} {choice['unit']}")
        if served := result.get("per_client"):
            facts.add_row(
                "per client",
                f"mean {served['mean']:.2%}, worst decile {served['worst_decile']:.2%}",
            )
        if spent := result.get("privacy"):
            bound = f"ε = {spent['epsilon']:.3g} at δ = {spent['delta']:.0e}"
            facts.add_row("privacy", f"{spent['kind']}: {bound}")
        facts.add_row("parameters", f"sha256 {choice['parameters'][:16]}…")
        facts.add_row("time", f"{result['seconds']:.0f} s")
        for name, value in result["facts"].items():
            facts.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
    if signed:
        session = signed["sessions"][-1]
        facts.add_row("sessions", str(len(signed["sessions"])))
        facts.add_row("command", Text(signed["sessions"][0]["command"], overflow="fold"))
        facts.add_row("commit", session["git"] or "not from a git checkout")
        facts.add_row("device", f"{session['device']}, {session['threads']} threads")
    if state in ("interrupted", "failed"):
        facts.add_row("go on with", f"fedlens resume {folder.path}")
    return Group(facts, Text(), _curve(folder, (signed or {}).get("unit", "epoch")))


def suite_table(runs: Sequence[tuple[Cell, RunFolder]]) -> Table:
    """Test accuracy over seeds in % of every row and column: mean ± half the 95 % interval."""
    columns = list(dict.fromkeys(cell.column for cell, _ in runs))
    title = runs[0][0].section or None
    heads = [column or "accuracy" for column in columns]
    table = Table("test top-1 in %", *heads, title=title, title_justify="left", box=None)
    for row in dict.fromkeys(cell.row for cell, _ in runs):
        found = [
            [folder for cell, folder in runs if (cell.row, cell.column) == (row, column)]
            for column in columns
        ]
        table.add_row(row, *map(_over_seeds, found))
    return table


def _over_seeds(folders: Sequence[RunFolder]) -> RenderableType:
    results = [result for folder in folders if (result := folder.result)]
    tested = [100 * result["test"]["top1"] for result in results if "test" in result]
    if not tested:
        return "–" if len(results) == len(folders) else Text("failed", style="red")
    found = estimate(tested)
    said = f"{found.mean:.2f}" + ("" if found.half is None else f" ± {found.half:.2f}")
    few = found.count == 1 or found.count < len(folders)
    whole = f" of {len(folders)}" if found.count < len(folders) else ""
    plural = "" if found.count == 1 and not whole else "s"
    return said + (f" ({found.count}{whole} seed{plural})" if few else "")


def plan_table(runs: Iterable[tuple[str, str, str, float | None]]) -> Table:
    """Runs with their state, their length and the seconds they may take."""
    table = Table("run", "state", "length", "minutes", box=None, pad_edge=False)
    for label, state, length, seconds in runs:
        table.add_row(label, state, length, "–" if seconds is None else f"{seconds / 60:.1f}")
    return table


def partition_table(record: Mapping[str, Any]) -> Table:
    """Who holds what, in four lines."""
    found = record["statistics"]
    title = f"{record['name']}: {found['samples']} examples, {found['clients']} clients"
    table = Table("", "min", "mean", "max", title=title, box=None)
    for name, values in found["summary"].items():
        table.add_row(name.replace("_", " "), *(f"{values[k]:.4g}" for k in ("min", "mean", "max")))
    return table


def _tested(test: dict[str, Any]) -> str:
    return f"top-1 {percent(test)}, top-5 {test['top5']:.2%} of {test['count']} images"


def percent(metrics: dict[str, Any] | None) -> str:
    return f"{metrics['top1']:.2%}" if metrics else "–"


def _backbone(signed: dict[str, Any]) -> str:
    if "backbone" not in signed:
        return "–"
    start = "" if signed["pretrained"] else ", from scratch"
    return f"{signed['backbone']} at {signed['resolution']} px{start}"


def _federation(signed: dict[str, Any]) -> str:
    partition = signed["partition"]
    detail = {
        "classes": f", {partition['classes_per_client']} per client",
        "dirichlet": f", alpha {partition['alpha']}",
        "quantity": f", sigma {partition['sigma']}",
    }.get(partition["name"], "")
    return (
        f"{signed['algorithm']}, {signed['clients']} clients, {signed['local_steps']} local steps, "
        f"partition {partition['name']}{detail}"
    )


def _counted(signed: dict[str, Any], count: int) -> str:
    return f"{count} {signed.get('unit', 'epoch')}{'' if count == 1 else 's'}"


def _curve(folder: RunFolder, unit: str) -> Table:
    """Every record of a short run; of a long one, some twenty of those that were evaluated."""
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
            f"{record['lr']:.2e}" if "lr" in record else "–",
            f"{train['loss']:.3f}" if train else "–",
            f"{train['accuracy']:.2%}" if train else "–",
            f"{validation['loss']:.3f}" if validation else "–",
            percent(validation),
        )
    return table


def _last_validation(folder: RunFolder) -> dict[str, Any]:
    evaluated = [r for r in folder.journal("metrics").read() if "validation" in r]
    return evaluated[-1] if evaluated else {}
