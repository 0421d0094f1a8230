"""θ_base + α·τ over a grid of α, chosen on validation; τ of one run, or a sum over several.

Task arithmetic: Ilharco et al., 2023, https://arxiv.org/abs/2212.04089.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from fedlens import params
from fedlens.analyses.analysis import Analysis, Candidate, choose_and_test, most_accurate
from fedlens.arithmetic.interference import barrier
from fedlens.arithmetic.task_vectors import applied, composed, lerp, norm, task_vector
from fedlens.errors import FedlensError
from fedlens.experiments.loaded_run import LoadedRun
from fedlens.params import Params
from fedlens.store.analysis_records import Record, require_result

log = logging.getLogger(__name__)


def sweep_alpha(
    run: LoadedRun,
    base: Params,
    base_name: str,
    name: str,
    alphas: Sequence[float],
    **more: object,
) -> Record:
    """W_base + α(W_run − W_base), and the loss barrier between both; `more` enters the record."""
    candidates = [Candidate({"alpha": a}, partial(lerp, base, run.tuned, a)) for a in alphas]
    length = norm(task_vector(base, run.tuned))
    analysis = Analysis(
        name,
        {"kind": "alpha", "base": base_name, "norm": length, **more},
        most_accurate,
        _chosen_unit(run),
        summary=_connectivity,
    )
    return choose_and_test(run, analysis, candidates)


def compose(
    run: LoadedRun,
    others: Mapping[str, LoadedRun],
    coefficients: Mapping[str, float],
    name: str,
    alphas: Sequence[float],
) -> Record:
    """θ + α Σ c_r τ_r: τ_r is the task vector of run r, θ the start of the first run."""
    differences = [check_comparable(run, other) for other in others.values()]
    vector = composed(
        (coefficient, task_vector(others[other].start, others[other].tuned))
        for other, coefficient in coefficients.items()
    )
    candidates = [Candidate({"alpha": a}, partial(applied, run.start, vector, a)) for a in alphas]
    record = {"kind": "compose", "terms": dict(coefficients), "norm": norm(vector)}
    for difference in differences:
        record |= difference
    return choose_and_test(
        run, Analysis(name, record, most_accurate, _chosen_unit(run)), candidates
    )


def check_comparable(run: LoadedRun, other: LoadedRun) -> Record:
    """Refuse a different model; warn, and note for the record, if validation splits differ."""
    if difference := params.mismatch(run.start, other.start):
        raise FedlensError(
            f"{other.folder.name} has a different model than {run.folder.name} ({difference}): "
            "name runs that train the same backbone and head."
        )
    if run.validation_split == other.validation_split:
        return {}
    log.warning(
        "%s may have trained on images that %s holds out for validation: their seeds or splits "
        "differ", other.folder.name, run.folder.name,
    )  # fmt: skip
    return {"splits_differ": True}


def _chosen_unit(run: LoadedRun) -> int:
    return int(require_result(run.folder)["choice"]["unit"])


def _connectivity(rows: Sequence[Record]) -> Record:
    """The loss barrier between base and run, where both were measured."""
    alphas = [row["alpha"] for row in rows]
    if 0 not in alphas or 1 not in alphas:
        return {}
    return {"barrier": barrier(alphas, [row["validation"]["loss"] for row in rows])}
