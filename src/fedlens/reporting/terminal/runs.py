"""Runs as tables in a terminal, from their records alone."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.errors import FedlensError
from fedlens.reporting.study.labels import NONE, counted, percent
from fedlens.store.run_folder import RunFolder

SHOWN = 20  # lines of a learning curve
COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def runs_table(folders: Iterable[RunFolder]) -> RenderableType:
    """A line for each run; below them, the runs that cannot be read and why."""
    table = Table(box=None, pad_edge=False)
    for column in ("run", "data", "backbone", "state", "done", "validation", "test"):
        right = column in ("done", "validation", "test")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    unreadable = []
    for folder in folders:
        try:
            with folder.named_in_errors():
                table.add_row(*_row(folder))
        except FedlensError as error:  # show the other runs all the same
            line = f"{folder.name} is unreadable: {error}"
            unreadable.append(Text(line, style="red", overflow="fold"))
    return Group(*([table] if table.row_count else []), *unreadable)


def _row(folder: RunFolder) -> list[RenderableType]:
    state, result, manifest = folder.state(), folder.result, folder.manifest or {}
    last = _last_validation(folder) if result is None else result
    done = folder.position() if result is None else result["units"]
    return [
        folder.name,
        _label(manifest, "data"),
        _backbone(manifest),
        Text(state, style=COLOURS[state]),
        counted(done, manifest.get("unit", "epoch")),
        percent(last.get("validation")),
        percent(None if result is None else result.get("test")),
    ]


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
            facts.add_row("trained", f"{manifest['density']:.4g} of the weights: {rule}")
        if "clients" in manifest:
            facts.add_row("federation", _federation(manifest))
    if result:
        _add_result(facts, result)
    if manifest:
        session = manifest["sessions"][-1]
        facts.add_row("sessions", str(len(manifest["sessions"])))
        facts.add_row("command", Text(manifest["sessions"][0]["command"], overflow="fold"))
        facts.add_row("commit", session["git"] or "not from a git checkout")
        facts.add_row("device", f"{session['device']}, {session['threads']} threads")
    if state in ("interrupted", "failed"):
        facts.add_row("resume with", f"fedlens resume {folder.path}")
    return Group(facts, Text(), _curve(folder, (manifest or {}).get("unit", "epoch")))


def _add_result(facts: Table, result: Mapping[str, Any]) -> None:
    choice, test = result["choice"], result.get("test")
    facts.add_row("test", _tested(test) if test else NONE)
    facts.add_row("validation", f"top-1 {percent(result['validation'])}")
    facts.add_row("chosen on", f"{choice['chosen_on']}, {result['unit']} {choice['unit']}")
    if clients := result.get("per_client"):
        facts.add_row(
            "per client", f"mean {clients['mean']:.2%}, worst decile {clients['worst_decile']:.2%}"
        )
    if privacy := result.get("privacy"):
        bound = f"ε = {privacy['epsilon']:.3g} at δ = {privacy['delta']:.0e}"
        facts.add_row("privacy", f"{privacy['kind']}: {bound}")
    facts.add_row("parameters", f"sha256 {choice['parameters'][:16]}…")
    facts.add_row("time", f"{result['seconds']:.0f} s")
    for name, value in result["facts"].items():
        facts.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}")


def _tested(test: Mapping[str, Any]) -> str:
    return f"top-1 {percent(test)}, top-5 {test['top5']:.2%} of {test['count']} images"


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
        f"{_label(manifest, 'algorithm')}, {manifest['clients']} clients, "
        f"{manifest['local_steps']} local steps, "
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
