"""Analyses of finished models as tables in a terminal, from their records alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedlens.reporting.terminal.runs import percent

NONE = "–"
LISTED = 12  # more clients than this make a matrix wider than a terminal

SYMBOLS = {"alpha": "α", "scale": "λ"}
EQUATIONS = {  # by kind: what was done
    "alpha": "base + α(run − base)",
    "compose": "θ + α Σ c τ",
    "merge": "θ + merged updates of a round",
    "clients": "θ + Σ c_k · contribution of client k",
    "forget": "θ − λ · what is forgotten",
    "interference": "two clients of a round, merged",
}


def analysis_page(record: Mapping[str, Any]) -> RenderableType:
    """What was asked, every candidate on validation, and what the chosen one came to."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", Text(record["run"], overflow="fold"))
    facts.add_row("what", EQUATIONS[record["kind"]])
    for name, value in asked(record):
        facts.add_row(name, Text(value, overflow="fold"))
    if record["kind"] == "interference":
        return Group(facts, Text(), *_interference(record))
    ends = Table.grid(padding=(0, 2))
    for name, value in outcome(record):
        ends.add_row(name, value)
    return Group(facts, Text(), candidates_table(record), Text(), ends)


def candidates_table(record: Mapping[str, Any]) -> Table:
    """A line for every candidate; the chosen one is marked."""
    rows = record["candidates"]
    told = [key for key in ("method", "edit", "alpha", "scale") if key in rows[0]]
    shares = [key for key in ("target", "control") if key in rows[0]]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for key in told:
        table.add_column(SYMBOLS.get(key, key), justify="right" if key in SYMBOLS else "left")
    for column in ("val. loss", "val. acc.", *shares):
        table.add_column(column, justify="right")
    for place, row in enumerate(rows):
        chosen = place == record["chosen"]
        table.add_row(
            "→" if chosen else "",
            *(_value(row[key]) for key in told),
            f"{row['validation']['loss']:.4f}",
            percent(row["validation"]),
            *(_share(row[key]) for key in shares),
            style="bold" if chosen else None,
        )
    return table


def methods_table(methods: Mapping[str, tuple[str, str]]) -> Table:
    """{name: (what it does, its paper)}"""
    table = Table("method", "what it does", "paper", box=None, pad_edge=False)
    for name, told in methods.items():
        table.add_row(Text(name, style="bold"), *map(Text, told))
    return table


def said_of(row: Mapping[str, Any]) -> str:
    """What distinguishes a candidate: `ties, λ 0.5`."""
    words = [str(row[key]).replace("_", " ") for key in ("method", "edit") if key in row]
    return ", ".join(words + [f"{s} = {row[key]:g}" for key, s in SYMBOLS.items() if key in row])


def asked(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was done, to what, and what to mind."""
    found = [(key, f"{record[key]:g}") for key in ("density", "keep", "norm") if key in record]
    if "base" in record:
        found.insert(0, ("base", record["base"]))
    if terms := record.get("terms"):
        found.insert(0, ("Σ c τ", " ".join(f"{c:+g}·{name}" for name, c in terms.items())))
    if record.get("class") is not None:
        found.append(("forget", f"class {record['class']}, at clients {_numbers(record)}"))
    if record.get("client") is not None:
        found.append(("forget", f"client {record['client']}"))
    if "coefficients" in record:
        edits = [f"client {k} × {c:g}" for k, c in record["coefficients"].items()]
        found.append(("edits", ", ".join(edits) or "none"))
    if "round" in record:
        found.append(("round", f"{record['round']}, clients {_numbers(record)}"))
    if "rounds" in record:
        found.append(("rounds", f"{record['rounds'][0]} to {record['rounds'][-1]}"))
    if (rounds := other_rounds(record)) is not None:
        said = "the model as trained is of round {}, the one edited of round {}"
        found.append(("mind", said.format(*rounds)))
    if record.get("splits_differ"):
        found.append(("mind", "a run may have trained on images held out here: seeds differ"))
    return found + [
        ("left out", f"{said_of(told)}: its loss is not finite")
        for told in record.get("left_out", [])
    ]


def other_rounds(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of the model as trained and of the one edited, where they differ."""
    if "as_trained" not in record:
        return None
    rounds = record["as_trained"]["unit"], record["choice"]["unit"]
    return rounds if rounds[0] != rounds[1] else None


def outcome(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What came out, beside the model as it was trained."""
    if record["kind"] == "interference":
        return [
            ("sign conflict of all clients", _share(record["sign_conflict_of_all"])),
            ("normalised accuracy, mean", _share(record["accuracy_normalised_mean"])),
        ]
    trained, chosen = record["as_trained"], record["candidates"][record["chosen"]]
    word = "edited" if record["kind"] == "clients" else "chosen"
    found = [
        (word, f"{said_of(chosen)}: validation {percent(chosen['validation'])}"),
        ("test", f"{percent(record['test'])}{_parts(record['test'])}"),
        ("as trained", f"test {percent(trained['test'])}{_parts(trained['test'])}, validation "
                       f"{percent(trained['validation'])}"),
    ]  # fmt: skip
    if record["kind"] in ("alpha", "compose") and record["chosen"] == len(record["candidates"]) - 1:
        found.append(("mind", "the best α is the largest tried: widen the grid"))
    if "barrier" in record:
        found.append(("barrier", f"{record['barrier']:.4f} above the chord, in validation loss"))
    return found


def _interference(record: Mapping[str, Any]) -> list[RenderableType]:
    clients, (first, second) = record["clients"], record["pair"]
    found: list[RenderableType] = []
    if len(clients) <= LISTED:
        for title, key in (("cosine", "cosine"), ("sign conflict", "sign_conflict")):
            found += [_matrix(title, clients, record[key], clients, "{:.3f}"), Text()]
    served = Table(f"clients {first} and {second}", str(first), str(second), box=None)
    for words, key in (("alone", "accuracy_alone"), ("merged", "accuracy_merged")):
        served.add_row(f"accuracy, {words}", *map(_share, record[key]))
    served.add_row("merged / alone", *map(_share, record["accuracy_normalised"]))
    errors, alphas = record["disentanglement_error"], [f"{a:g}" for a in record["alphas"]]
    title = f"disentanglement error: α of {first} down, of {second} across"
    summary = Table.grid(padding=(0, 2))
    for row in outcome(record):
        summary.add_row(*row)
    return [
        *found,
        served,
        Text(),
        _matrix(title, alphas, errors, alphas, "{:.1%}"),
        Text(),
        summary,
    ]


def _matrix(
    title: str,
    down: Sequence[object],
    values: Sequence[Sequence[float | None]],
    across: Sequence[object],
    form: str,
) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, justify="right")
    for name in across:
        table.add_column(str(name), justify="right")
    for name, row in zip(down, values, strict=True):
        table.add_row(str(name), *(NONE if v is None else form.format(v) for v in row))
    return table


def _parts(found: Mapping[str, Any]) -> str:
    """Target and control accuracy, where they were asked for."""
    told = [f"{key} {_share(found[key])}" for key in ("target", "control") if key in found]
    return f" ({', '.join(told)})" if told else ""


def _numbers(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record["clients"]))


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.2%}"
