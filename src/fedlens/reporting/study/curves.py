"""Learning curves over seeds: validation accuracy and the agreement of clients, by round."""

from collections.abc import Sequence
from statistics import fmean

from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import Comparison
from fedlens.reporting.study.content import Curve, CurveSet, Observation
from fedlens.reporting.study.runs import Method, Record, Run, megabytes
from fedlens.reporting.study.statistics import estimate

POINTS = 150  # at most in a curve: more are thinner than a line
OBSERVED = ("drift", "cosine", "sign_agreement")


def curve_set(comparison: Comparison) -> CurveSet | None:
    """The curves of a table's methods; None if nothing was trained."""
    grid = comparison.grid
    named = {
        cell_label(grid.rows, grid.columns, place): method
        for place, method in comparison.methods.items()
        if labels.trains(method)
    }
    if not named:
        return None
    central = not any(labels.federated(method) for method in named.values())
    return CurveSet(
        name=grid.name,
        question=grid.question,
        title=grid.title,
        unit="epoch" if central else "round",
        curves=[curve(label, method) for label, method in named.items()],
        observations=[
            observation(label, method)
            for label, method in named.items()
            if labels.federated(method)
        ],
    )  # fmt: skip


def curve(label: str, method: Method) -> Curve:
    unit = _unit(method)
    scores = [
        {r[unit]: 100 * r["validation"]["top1"] for r in run.metrics if "validation" in r}
        for run in method.runs
    ]
    units = _thinned(sorted(set.intersection(*(set(values) for values in scores))))
    estimates = [estimate([values[number] for values in scores]) for number in units]
    sent, each = [_sent(run) for run in method.runs], _steps(method)
    return Curve(
        label=label,
        runs=[run.name for run in method.runs],
        unit=units,
        steps=[number * each for number in units] if each else [],
        megabytes=[fmean(run[number] for run in sent) for number in units if all(sent)],
        mean=[value.mean for value in estimates],
        half=[value.half for value in estimates],
    )


def observation(label: str, method: Method) -> Observation:
    rounds = [
        {r["round"]: r for r in run.metrics if any(name in r for name in OBSERVED)}
        for run in method.runs
    ]
    shared = _thinned(sorted(set.intersection(*(set(records) for records in rounds))))
    drift, cosine, agreement = (
        [_mean([records[number] for records in rounds], name) for number in shared]
        for name in OBSERVED
    )
    return Observation(
        label=label,
        runs=[run.name for run in method.runs],
        round=shared,
        drift=drift,
        cosine=cosine,
        sign_agreement=agreement,
    )


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [record.get(name) for record in records]
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def cell_label(rows: Sequence[str], columns: Sequence[str], place: tuple[str, str]) -> str:
    """The shortest label that distinguishes the cells of the table."""
    row, column = place
    parts = [row if len(rows) > 1 else "", column if len(columns) > 1 else ""]
    return ", ".join(part for part in parts if part) or row


def _unit(method: Method) -> str:
    return "round" if labels.federated(method) else "epoch"


def _steps(method: Method) -> int | None:
    """Per epoch of central training, or per round of a client; None if it was not recorded."""
    if labels.federated(method):
        return int(method.get("federated.local_steps"))
    steps = [record["steps"] for record in method.runs[0].metrics if "steps" in record]
    return int(steps[0]) if steps else None


def _sent(run: Run) -> dict[int, float]:
    """Round → megabytes sent so far, both ways; empty for central training."""
    total, sent = run.megabytes_before, {}
    for record in run.metrics:
        if "round" in record:
            total += megabytes(record)
            sent[record["round"]] = total
    return sent


def _thinned(units: list[int]) -> list[int]:
    """At most POINTS of them, including the first and the last."""
    if len(units) <= POINTS:
        return units
    stride = (len(units) - 1) / (POINTS - 1)
    return [units[round(place * stride)] for place in range(POINTS)]
