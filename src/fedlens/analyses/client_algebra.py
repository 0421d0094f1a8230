"""Algebra on the updates that clients sent: merge a round anew, drop, re-weight, negate, forget.

It needs a run with federated.keep_updates=N. Over the N rounds kept, client k contributed
c_k = Σ_r p_rk (w_rk − w_r), and under plain averaging the model at their end is the model at their
start plus all contributions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fedlens.analyses.analysis import Analysis, Candidate, carry_out, most_accurate
from fedlens.analyses.loaded_run import OpenedRun
from fedlens.arithmetic import merging
from fedlens.arithmetic.forgetting import forgetting_choice
from fedlens.arithmetic.merging import MergeSettings
from fedlens.arithmetic.task_vectors import applied, composed, task_vector
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.store.analysis_records import Record, rounds_kept
from fedlens.store.client_updates import KeptRound, read_round
from fedlens.training.evaluate import Evaluation


def kept_round(opened: OpenedRun, number: int | None = None) -> KeptRound:
    """The round of that number, or the last one kept."""
    there = rounds_kept(opened.folder)
    if number is not None and number not in there:
        raise FedlensError(f"Round {number} was not kept: rounds {there[0]} to {there[-1]} were.")
    return read_round(opened.folder.updates, there[-1] if number is None else number)


def merge(
    opened: OpenedRun,
    analysis: str,
    methods: Sequence[str],
    scales: Sequence[float],
    settings: MergeSettings,
    number: int | None = None,
) -> Record:
    """One round's updates merged by each method at each λ, and the best of them tested."""
    kept = kept_round(opened, number)
    vectors = {client: task_vector(kept.start, end) for client, end in kept.clients.items()}
    stream = Stream(opened.config.seed, ("merge", kept.number))

    def edited(method: str, scale: float) -> Params:
        merged = merging.merge(
            method,
            list(vectors.values()),
            [kept.examples[client] for client in vectors],
            settings=replace(settings, scale=scale),
            ids=list(vectors),
            stream=stream,
        )
        return opened.whole(applied(kept.start, merged))

    candidates = [
        Candidate({"method": method, "scale": scale}, partial(edited, method, scale))
        for method in methods
        for scale in scales
    ]
    about = {
        "kind": "merge",
        "round": kept.number,
        "clients": list(vectors),
        **{key: value for key, value in asdict(settings).items() if key != "scale"},
    }
    return carry_out(opened, Analysis(analysis, about, most_accurate, kept.number), candidates)


@dataclass(frozen=True)
class Contributions:
    """θ before the rounds kept, and who took part in them; packed as they travelled."""

    folder: Path
    rounds: list[int]
    clients: list[int]
    start: dict[str, torch.Tensor]

    def summed(self, factors: Mapping[int, float]) -> dict[str, torch.Tensor]:
        """Σ f_k c_k, a round at a time; clients without a factor count 0."""
        return composed(
            (factors.get(client, 0.0) * share, task_vector(kept.start, end))
            for kept in (read_round(self.folder, number) for number in self.rounds)
            for client, end, share in _shares(kept)
        )

    def everything(self) -> dict[str, torch.Tensor]:
        return self.summed(dict.fromkeys(self.clients, 1.0))


def contributions(opened: OpenedRun) -> Contributions:
    algorithm = opened.config.algorithm
    if (algorithm.aggregator, algorithm.server, algorithm.server_lr) != ("mean", "average", 1.0):
        raise FedlensError(
            f"{opened.folder.name} did not average plainly ({algorithm.name}), so its model is not "
            "the sum of what its clients sent."
        )
    rounds = rounds_kept(opened.folder)
    clients: set[int] = set()
    start: dict[str, torch.Tensor] = {}
    reached: Params = {}
    for number in rounds:
        kept = read_round(opened.folder.updates, number)
        start = start or kept.start
        if reached and not _close(reached, kept.start):
            raise FedlensError(
                f"Round {number} of {opened.folder.name} does not begin where the rounds kept "
                "before it ended: its files are of different runs, remove them and run it anew."
            )
        clients |= kept.clients.keys()
        terms = [(share, task_vector(kept.start, end)) for _, end, share in _shares(kept)]
        reached = applied(kept.start, composed(terms))
    return Contributions(opened.folder.updates, rounds, sorted(clients), start)


def _shares(kept: KeptRound) -> Iterator[tuple[int, Params, float]]:
    """Every client of a round, its parameters, and its share of the examples."""
    total = sum(kept.examples.values())
    for client, end in kept.clients.items():
        yield client, end, kept.examples[client] / total


def _close(one: Params, other: Params) -> bool:
    """But for the order in which clients were added up."""
    return all(torch.allclose(value, other[name], rtol=1e-5) for name, value in one.items())


def recombine(
    opened: OpenedRun, analysis: str, coefficients: Mapping[int, float], told: Contributions
) -> Record:
    """The model with clients dropped, re-weighted or negated, beside the one with all as they were.

    Target are the classes of clients whose coefficient is not 1, control is all the rest.
    """
    changed = [client for client, factor in coefficients.items() if factor != 1]

    def edited(vector: Params) -> Params:
        return opened.whole(applied(told.start, vector))

    candidates = [
        Candidate({"edit": "none"}, partial(edited, told.everything())),
        Candidate({"edit": "asked for"}, partial(edited, told.summed(coefficients))),
    ]
    asked = Analysis(
        analysis,
        {
            "kind": "clients",
            "rounds": told.rounds,
            "coefficients": {str(client): coefficients[client] for client in changed},
        },
        lambda rows: 1,
        told.rounds[-1],
        remarks=partial(target_and_control, _held_by(opened, changed)),
        told=True,
    )
    return carry_out(opened, asked, candidates)


def forget(
    opened: OpenedRun,
    analysis: str,
    told: Contributions,
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
        if client not in told.clients:
            raise FedlensError(f"Client {client} took no part in the rounds kept: {_who(told)}.")
        factors = {client: 1.0}
        target = _held_by(opened, [client])
    else:
        assert label is not None
        held = opened.parts.held_classes
        if not 0 <= label < held.shape[1]:
            raise FedlensError(f"There is no class {label}: they are 0 to {held.shape[1] - 1}.")
        shares = (held[:, label] / held.sum(1).clamp(min=1)).tolist()
        factors = {k: shares[k] for k in told.clients if shares[k] > 0}
        target = {label}
        if not factors:
            raise FedlensError(f"No client of the rounds kept holds class {label}: {_who(told)}.")
    _check_measurable(opened, target)
    as_trained, direction = told.everything(), told.summed(factors)

    def edited(scale: float) -> Params:
        return opened.whole(applied(told.start, composed([(1.0, as_trained), (-scale, direction)])))

    def pick(rows: Sequence[Record]) -> int:
        tried, *accuracies = ([row[key] for row in rows] for key in ("scale", "target", "control"))
        return tried.index(forgetting_choice(tried, *accuracies, keep=keep))

    asked = Analysis(
        analysis,
        {
            "kind": "forget",
            "rounds": told.rounds,
            "class": label,
            "client": client,
            "clients": {str(k): factor for k, factor in factors.items()},
            "keep": keep,
        },
        pick,
        told.rounds[-1],
        remarks=partial(target_and_control, target),
    )
    candidates = [Candidate({"scale": scale}, partial(edited, scale)) for scale in scales]
    return carry_out(opened, asked, candidates)


def target_and_control(target: set[int], found: Evaluation) -> Record:
    """Accuracy on the classes of `target` and on all others, each a mean over classes."""
    known = {label: value for label, value in enumerate(found.per_class) if value is not None}
    parts = {
        "target": [value for label, value in known.items() if label in target],
        "control": [value for label, value in known.items() if label not in target],
    }
    return {part: sum(values) / len(values) if values else None for part, values in parts.items()}


def _check_measurable(opened: OpenedRun, target: set[int]) -> None:
    """Forgetting needs validation images of what is forgotten, and of something else."""
    examples = opened.parts.validation
    seen = set(examples.labels.tolist()) if examples else set()
    if not seen & target:
        raise FedlensError("No validation image is of a class to forget: hold out more of them.")
    if seen <= target:
        raise FedlensError(
            "All classes would be forgotten, so nothing tells what that costs: name a client that "
            "holds some of them only, or one class."
        )


def _held_by(opened: OpenedRun, clients: Sequence[int]) -> set[int]:
    held = opened.parts.held_classes[list(clients)].sum(0)
    return set(held.nonzero()[:, 0].tolist())


def _who(told: Contributions) -> str:
    return f"they have {', '.join(map(str, told.clients))}"
