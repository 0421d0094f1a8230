"""What the record of an analysis says, as pairs of a name and a text.

An analysis edits a finished model θ by task vectors (α sweep, composition, merging, clients'
contributions, forgetting) or measures how two clients' updates interfere.
"""

from collections.abc import Mapping
from typing import Any

from fedlens.reporting.study.labels import percent, share

Record = Mapping[str, Any]

SYMBOLS = {"alpha": "α", "scale": "λ"}
EQUATIONS = {  # kind → the model that is tested
    "alpha": "base + α(run − base)",
    "compose": "θ + α Σ c τ",
    "merge": "θ + merged updates of a round",
    "clients": "θ + Σ c_k · contribution of client k",
    "forget": "θ − λ · contribution to forget",
    "interference": "two clients of a round, merged",
}


def candidate_label(row: Record) -> str:
    """What distinguishes a candidate: 'ties, λ = 0.5'."""
    names = [str(row[key]).replace("_", " ") for key in ("method", "edit") if key in row]
    scales = [f"{symbol} = {row[key]:g}" for key, symbol in SYMBOLS.items() if key in row]
    return ", ".join([*names, *scales])


def analysis_settings(record: Record) -> list[tuple[str, str]]:
    """What was edited and how, with caveats."""
    facts = [(key, f"{record[key]:g}") for key in ("density", "keep", "norm") if key in record]
    if "base" in record:
        facts.insert(0, ("base", record["base"]))
    if terms := record.get("terms"):
        facts.insert(0, ("Σ c τ", " ".join(f"{c:+g}·{name}" for name, c in terms.items())))
    if record.get("class") is not None:
        facts.append(("forget", f"class {record['class']}, at clients {_clients(record)}"))
    if record.get("client") is not None:
        facts.append(("forget", f"client {record['client']}"))
    if "coefficients" in record:
        edits = [f"client {k} × {c:g}" for k, c in record["coefficients"].items()]
        facts.append(("edits", ", ".join(edits) or "none"))
    if "round" in record:
        facts.append(("round", f"{record['round']}, clients {_clients(record)}"))
    if "rounds" in record:
        facts.append(("rounds", f"{record['rounds'][0]} to {record['rounds'][-1]}"))
    if (rounds := different_rounds(record)) is not None:
        text = "the model as trained is from round {}, the edited one from round {}"
        facts.append(("note", text.format(*rounds)))
    if record.get("splits_differ"):
        facts.append(
            ("note", "seeds differ: a run may have trained on images held out for validation here")
        )
    return facts + [
        ("left out", f"{candidate_label(row)}: its loss is not finite")
        for row in record.get("left_out", [])
    ]


def different_rounds(record: Record) -> tuple[int, int] | None:
    """Rounds of the model as trained and of the edited one; None if they are the same."""
    if "as_trained" not in record:
        return None
    rounds = record["as_trained"]["unit"], record["choice"]["unit"]
    return rounds if rounds[0] != rounds[1] else None


def analysis_results(record: Record) -> list[tuple[str, str]]:
    """The chosen candidate beside the model as it was trained."""
    if record["kind"] == "interference":
        return [
            ("sign conflict of all clients", share(record["sign_conflict_of_all"])),
            ("normalised accuracy, mean", share(record["accuracy_normalised_mean"])),
        ]
    trained, chosen = record["as_trained"], record["candidates"][record["chosen"]]
    name = "edited" if record["kind"] == "clients" else "chosen"
    facts = [
        (name, f"{candidate_label(chosen)}: validation {percent(chosen['validation'])}"),
        ("test", f"{percent(record['test'])}{_parts(record['test'])}"),
        ("as trained", f"test {percent(trained['test'])}{_parts(trained['test'])}, validation "
                       f"{percent(trained['validation'])}"),
    ]  # fmt: skip
    if record["kind"] in ("alpha", "compose") and record["chosen"] == len(record["candidates"]) - 1:
        facts.append(("note", "the best α is the largest tried: widen the grid"))
    if "barrier" in record:
        facts.append(("barrier", f"{record['barrier']:.4f} above the chord, in validation loss"))
    return facts


def _parts(metrics: Record) -> str:
    """Target and control accuracy, if they were measured."""
    parts = [f"{key} {share(metrics[key])}" for key in ("target", "control") if key in metrics]
    return f" ({', '.join(parts)})" if parts else ""


def _clients(record: Record) -> str:
    return ", ".join(map(str, record["clients"]))
