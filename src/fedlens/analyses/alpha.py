"""θ_base + α·τ over a grid of α, chosen on validation: τ of one run, or composed of several."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from fedlens import params
from fedlens.analyses.analysis import Analysis, Candidate, carry_out, most_accurate
from fedlens.analyses.loaded_run import OpenedRun
from fedlens.arithmetic.interference import barrier
from fedlens.arithmetic.task_vectors import applied, composed, lerp, norm, task_vector
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.store.analysis_records import Record, result_of

log = logging.getLogger(__name__)


def scale(
    opened: OpenedRun,
    base: Params,
    named: str,
    analysis: str,
    alphas: Sequence[float],
    **remarks: object,
) -> Record:
    """W_base + α(W_fed − W_base), and how far the loss rises on the way; `named` is the base."""
    candidates = [Candidate({"alpha": a}, partial(lerp, base, opened.tuned, a)) for a in alphas]
    asked = Analysis(
        analysis,
        {"kind": "alpha", "base": named, "norm": norm(task_vector(base, opened.tuned)), **remarks},
        most_accurate,
        _unit(opened),
        summary=_connectivity,
    )
    return carry_out(opened, asked, candidates)


def compose(
    opened: OpenedRun,
    others: Mapping[str, OpenedRun],
    coefficients: Mapping[str, float],
    analysis: str,
    alphas: Sequence[float],
) -> Record:
    """θ + α Σ c_r τ_r, with τ_r what run r learned and θ what the first of them began from."""
    remarks = [comparable(opened, other) for other in others.values()]
    vector = composed(
        (coefficient, task_vector(others[name].start, others[name].tuned))
        for name, coefficient in coefficients.items()
    )
    candidates = [
        Candidate({"alpha": a}, partial(applied, opened.start, vector, a)) for a in alphas
    ]
    about = {"kind": "compose", "terms": dict(coefficients), "norm": norm(vector)}
    for found in remarks:
        about |= found
    return carry_out(opened, Analysis(analysis, about, most_accurate, _unit(opened)), candidates)


def comparable(opened: OpenedRun, other: OpenedRun) -> Record:
    """Refuses another model; says so, for the record too, where the other held out other images."""
    one, two = opened.config, other.config
    if fault := params.mismatch(opened.start, other.start):
        raise FedlensError(
            f"{other.folder.name} has another model than {opened.folder.name} ({fault}): name runs "
            "that train the same backbone and head."
        )
    splits = [(c.seed, c.data.name, c.data.validation, c.data.train_per_class) for c in (one, two)]
    if splits[0] == splits[1]:
        return {}
    log.warning(
        "%s may have trained on images that %s holds out for validation: their seeds or splits "
        "differ", other.folder.name, opened.folder.name,
    )  # fmt: skip
    return {"splits_differ": True}


def _unit(opened: OpenedRun) -> int:
    return int(result_of(opened.folder)["choice"]["unit"])


def _connectivity(rows: Sequence[Record]) -> Record:
    """The barrier between base and fed, where both ends were measured."""
    alphas = [row["alpha"] for row in rows]
    if 0 not in alphas or 1 not in alphas:
        return {}
    return {"barrier": barrier(alphas, [row["validation"]["loss"] for row in rows])}
