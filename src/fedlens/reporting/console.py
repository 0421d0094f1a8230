"""Runs as tables in a terminal, from their records alone."""

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.errors import FedlensError
from fedlens.experiments.records import RunFolder

COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def runs_table(folders: Iterable[RunFolder]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("run", "data", "backbone", "state", "epoch", "validation", "test"):
        right = column in ("epoch", "validation", "test")
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
        str(last.get("epoch", 0) if result is None else result["epochs"]),
        percent(last.get("validation")),
        percent(None if result is None else result["test"]),
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
    if result:
        choice, test = result["choice"], result["test"]
        facts.add_row(
            "test", f"top-1 {percent(test)}, top-5 {test['top5']:.2%} of {test['count']} images"
        )
        facts.add_row("validation", f"top-1 {percent(result['validation'])}")
        facts.add_row("chosen on", f"{choice['chosen_on']}, epoch {choice['unit']}")
        facts.add_row("parameters", f"sha256 {choice['parameters'][:16]}…")
        facts.add_row("time", f"{result['seconds']:.0f} s")
        for name, value in result["facts"].items():
            facts.add_row(name, f"{value:.4g}")
    if signed:
        session = signed["sessions"][-1]
        facts.add_row("sessions", str(len(signed["sessions"])))
        facts.add_row("command", Text(signed["sessions"][0]["command"], overflow="fold"))
        facts.add_row("commit", session["git"] or "not from a git checkout")
        facts.add_row("device", f"{session['device']}, {session['threads']} threads")
    if state in ("interrupted", "failed"):
        facts.add_row("go on with", f"fedlens resume {folder.path}")
    return Group(facts, Text(), _curve(folder))


def percent(metrics: dict[str, Any] | None) -> str:
    return f"{metrics['top1']:.2%}" if metrics else "–"


def _backbone(signed: dict[str, Any]) -> str:
    if "backbone" not in signed:
        return "–"
    start = "" if signed["pretrained"] else ", from scratch"
    return f"{signed['backbone']} at {signed['resolution']} px{start}"


def _curve(folder: RunFolder) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("epoch", "lr", "train loss", "train acc.", "val. loss", "val. acc."):
        table.add_column(column, justify="right")
    for record in folder.journal("metrics").read():
        train, validation = record.get("train"), record.get("validation")
        table.add_row(
            str(record["epoch"]),
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
