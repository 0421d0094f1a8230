"""Algebra on client updates: merge a round again; drop, re-weight, negate or forget clients.

It needs a run with federated.keep_updates=N. Over the N rounds kept, client k contributed
c_k = Σ_r p_rk (w_rk − w_r); under plain averaging the last model is the first plus Σ_k c_k.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedlens.analyses.analysis import Analysis, Candidate, choose_and_test, most_accurate
from fedlens.arithmetic.forgetting import choose_forgetting_scale
from fedlens.arithmetic.task_vectors import applied, composed, task_vector
from fedlens.errors import FedlensError
from fedlens.experiments.loaded_run import LoadedRun
from fedlens.federated.algorithms.merging import merge_packed
from fedlens.federated.client import client_stream, in_training_layout
from fedlens.federated.client_statistics import client_statistic
from fedlens.federated.tasks import ClientTask
from fedlens.params import Params
from fedlens.registry import merge_method
from fedlens.rng import Stream
from fedlens.store.analysis_records import Record, require_kept_rounds, require_result
from fedlens.store.client_updates import KeptRound, read_round
from fedlens.training.evaluate import Evaluation


def kept_round(run: LoadedRun, number: int | None = None) -> KeptRound:
    """The round of that number, or the last one kept."""
    kept = require_kept_rounds(run.folder)
    if number is not None and number not in kept:
        raise FedlensError(
            f"The updates of round {number} were not kept: choose from {kept[0]} to {kept[-1]}."
        )
    return read_round(run.folder.updates, kept[-1] if number is None else number)


def merge(
    run: LoadedRun,
    name: str,
    methods: Mapping[str, Mapping[str, Any]],
    scales: Sequence[float],
    number: int | None = None,
) -> Record:
    """One round's updates, merged by each method at each λ; the best on validation is tested.

    `methods` maps the names of merging methods to their parameters; λ is applied to the result.
    Statistics that a method needs are computed again, from the run's own data, as the clients of
    the round would have computed them.
    """
    _check_weights(run, methods)
    kept = kept_round(run, number)
    vectors = {client: task_vector(kept.start, end) for client, end in kept.clients.items()}
    stream = Stream(run.seed, ("merge", kept.number))
    statistics: dict[str | None, list[Params] | None] = {None: None}

    def edited(method: str, scale: float) -> Params:
        row = merge_method[method]
        needs = row.traits.get("needs")
        if needs not in statistics:
            statistics[needs] = client_statistics(run, kept, str(needs))
        merged = merge_packed(
            list(vectors.values()),
            row,
            run.packing,
            run.start,
            statistics=statistics[needs],
            weights=[kept.examples[client] for client in vectors],
            stream=stream,
            ids=list(vectors),
            **methods[method],
        )
        scaled = {name: value * scale for name, value in merged.items()}
        return run.unpacked(applied(kept.start, scaled))

    candidates = [
        Candidate({"method": method, "scale": scale}, partial(edited, method, scale))
        for method in methods
        for scale in scales
    ]
    record = {
        "kind": "merge",
        "round": kept.number,
        "clients": list(vectors),
        **_parameters_record(methods),
    }
    return choose_and_test(run, Analysis(name, record, most_accurate, kept.number), candidates)


def _check_weights(run: LoadedRun, methods: Iterable[str]) -> None:
    """Refuses methods that merge whole weights where clients sent LoRA's factors instead."""
    if run.packing.layout.keys() <= run.start.keys():
        return
    whole = [name for name in methods
             if {"needs", "matrices"} & merge_method[name].traits.keys()]  # fmt: skip
    if whole:
        others = [one for one in merge_method.names
                  if not {"needs", "matrices"} & merge_method[one].traits.keys()]  # fmt: skip
        raise FedlensError(
            f"Clients of {run.folder.name} sent LoRA's factors, and {', '.join(whole)} merge whole "
            f"weights: choose others, as in {' '.join(f'--method {one}' for one in others[:2])}."
        )


def client_statistics(run: LoadedRun, kept: KeptRound, needs: str) -> list[Params]:
    """What each client of a kept round would send beside its update, in the round's order."""
    partition = run.experiment.partition
    statistic = client_statistic(needs, run.statistics_examples)
    assert partition is not None
    assert statistic is not None
    found: list[Params] = []
    in_training_layout(run.experiment.model)  # on which the last bits depend
    for client, end in kept.clients.items():
        run.assign(run.unpacked(end))
        task = ClientTask(kept.number, client, steps=0, lr=0.0, examples=kept.examples[client])
        found.append(
            statistic.compute(
                run.experiment.model,
                run.packing,
                run.experiment.train,
                partition.shard(client),
                client_stream(run.seed, task),
            )
        )
    return found


def _parameters_record(methods: Mapping[str, Mapping[str, Any]]) -> Record:
    """Each parameter by its name, or as `method.name` where methods have different values."""
    values: dict[str, dict[str, Any]] = {}
    for method, parameters in methods.items():
        for key, value in parameters.items():
            values.setdefault(key, {})[method] = value
    record: Record = {}
    for key, by_method in values.items():
        first, *others = by_method.values()
        if all(other == first for other in others):
            record[key] = first
        else:
            record |= {f"{method}.{key}": value for method, value in by_method.items()}
    return record


@dataclass(frozen=True)
class Contributions:
    """The parameters before the kept rounds, and the clients that took part; packed as sent."""

    folder: Path
    rounds: list[int]
    clients: list[int]
    start: dict[str, torch.Tensor]

    def summed(self, factors: Mapping[int, float]) -> dict[str, torch.Tensor]:
        """Σ f_k c_k, a round at a time; the factor of clients that are not listed is 0."""
        return composed(
            (factors.get(client, 0.0) * share, task_vector(kept.start, end))
            for kept in (read_round(self.folder, number) for number in self.rounds)
            for client, end, share in _shares(kept)
        )

    def total(self) -> dict[str, torch.Tensor]:
        return self.summed(dict.fromkeys(self.clients, 1.0))


def contributions(run: LoadedRun) -> Contributions:
    if not run.adds_updates:
        algorithm = require_result(run.folder)["algorithm"]
        raise FedlensError(
            f"The model of {run.folder.name} is not the sum of its client updates, because it was "
            f"trained by {algorithm}: choose a run with algorithm=fedavg."
        )
    rounds = require_kept_rounds(run.folder)
    clients: set[int] = set()
    start: dict[str, torch.Tensor] = {}
    end_before: Params = {}
    for number in rounds:
        kept = read_round(run.folder.updates, number)
        start = start or kept.start
        if end_before and not _close(end_before, kept.start):
            raise FedlensError(
                f"Round {number} of {run.folder.name} does not start where the kept round before "
                "it ended: its files come from different runs, remove them and run it again."
            )
        clients |= kept.clients.keys()
        terms = [(share, task_vector(kept.start, end)) for _, end, share in _shares(kept)]
        end_before = applied(kept.start, composed(terms))
    return Contributions(run.folder.updates, rounds, sorted(clients), start)


def _shares(kept: KeptRound) -> Iterator[tuple[int, Params, float]]:
    """Every client of a round, its parameters, and its share in the mean."""
    shares = kept.shares()
    for client, end in kept.clients.items():
        yield client, end, shares[client]


def _close(one: Params, other: Params) -> bool:
    """Equal up to the order in which client updates were added."""
    return all(torch.allclose(value, other[name], rtol=1e-5) for name, value in one.items())


def recombine(
    run: LoadedRun, name: str, coefficients: Mapping[int, float], contributed: Contributions
) -> Record:
    """The model with clients dropped, re-weighted or negated, beside the model without the edit.

    Target classes are those of clients whose coefficient is not 1, control classes all others.
    """
    changed = [client for client, factor in coefficients.items() if factor != 1]

    def edited(vector: Params) -> Params:
        return run.unpacked(applied(contributed.start, vector))

    candidates = [
        Candidate({"edit": "none"}, partial(edited, contributed.total())),
        Candidate({"edit": "requested"}, partial(edited, contributed.summed(coefficients))),
    ]
    analysis = Analysis(
        name,
        {
            "kind": "clients",
            "rounds": contributed.rounds,
            "coefficients": {str(client): coefficients[client] for client in changed},
        },
        lambda rows: 1,
        contributed.rounds[-1],
        metrics=partial(target_and_control, _classes_of(run, changed)),
        requested=True,
    )
    return choose_and_test(run, analysis, candidates)


def forget(
    run: LoadedRun,
    name: str,
    contributed: Contributions,
    scales: Sequence[float],
    *,
    label: int | None = None,
    client: int | None = None,
    keep: float = 0.95,
) -> Record:
    """θ − λ Σ f_k c_k: f_k is 1 for the client to forget, or the share of the class in k's data.

    λ is chosen on validation: the lowest target accuracy that keeps `keep` of the control's.
    """
    if client is not None:
        if client not in contributed.clients:
            raise FedlensError(
                f"Client {client} took no part in the kept rounds: {_choices(contributed)}"
            )
        factors = {client: 1.0}
        target = _classes_of(run, [client])
    else:
        assert label is not None
        counts = run.experiment.class_counts
        if not 0 <= label < counts.shape[1]:
            raise FedlensError(
                f"There is no class {label}: choose from 0 to {counts.shape[1] - 1}."
            )
        shares = (counts[:, label] / counts.sum(1).clamp(min=1)).tolist()
        factors = {k: shares[k] for k in contributed.clients if shares[k] > 0}
        target = {label}
        if not factors:
            raise FedlensError(
                f"No client of the kept rounds holds class {label}: choose another class."
            )
    _check_measurable(run, target)
    as_trained, direction = contributed.total(), contributed.summed(factors)

    def edited(scale: float) -> Params:
        vector = composed([(1.0, as_trained), (-scale, direction)])
        return run.unpacked(applied(contributed.start, vector))

    def choose(rows: Sequence[Record]) -> int:
        tried, *accuracies = ([row[key] for row in rows] for key in ("scale", "target", "control"))
        return tried.index(choose_forgetting_scale(tried, *accuracies, keep=keep))

    analysis = Analysis(
        name,
        {
            "kind": "forget",
            "rounds": contributed.rounds,
            "class": label,
            "client": client,
            "clients": {str(k): factor for k, factor in factors.items()},
            "keep": keep,
        },
        choose,
        contributed.rounds[-1],
        metrics=partial(target_and_control, target),
    )
    candidates = [Candidate({"scale": scale}, partial(edited, scale)) for scale in scales]
    return choose_and_test(run, analysis, candidates)


def target_and_control(target: set[int], evaluation: Evaluation) -> Record:
    """Accuracy on the classes of `target` and on all others, each a mean over classes."""
    known = {label: value for label, value in enumerate(evaluation.per_class) if value is not None}
    parts = {
        "target": [value for label, value in known.items() if label in target],
        "control": [value for label, value in known.items() if label not in target],
    }
    return {part: sum(values) / len(values) if values else None for part, values in parts.items()}


def _check_measurable(run: LoadedRun, target: set[int]) -> None:
    """Forgetting needs validation images of target classes and of others."""
    examples = run.experiment.validation
    labels = set(examples.labels.tolist()) if examples else set()
    if not labels & target:
        raise FedlensError(
            "There are no validation images of the classes to forget: choose a run with a larger "
            "data.validation."
        )
    if labels <= target:
        raise FedlensError(
            "All classes would be forgotten, and none is left to measure the cost: choose a "
            "client that holds only some classes, or one class."
        )


def _classes_of(run: LoadedRun, clients: Sequence[int]) -> set[int]:
    """The classes that these clients hold."""
    counts = run.experiment.class_counts[list(clients)].sum(0)
    return set(counts.nonzero()[:, 0].tolist())


def _choices(contributed: Contributions) -> str:
    return f"choose from {', '.join(map(str, contributed.clients))}."
