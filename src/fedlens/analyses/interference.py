"""How the clients of one round interfere: angles and signs of their updates, and what two of them
do to each other's predictions. Measured on validation images alone, so nothing is tested.
"""

from collections.abc import Sequence
from itertools import count, product

import torch

from fedlens.analyses.client_algebra import kept_round
from fedlens.analyses.loaded_run import OpenedRun
from fedlens.arithmetic.interference import (
    cosine_matrix,
    disentanglement,
    normalised,
    sign_conflict,
    sign_conflict_matrix,
)
from fedlens.arithmetic.task_vectors import applied, composed, task_vector
from fedlens.data.images import Examples
from fedlens.errors import FedlensError
from fedlens.files import write_json
from fedlens.params import Params
from fedlens.runtime.progress import bar
from fedlens.store.analysis_records import Record, place
from fedlens.training.evaluate import predictions


def interference(
    opened: OpenedRun,
    analysis: str,
    alphas: Sequence[float],
    *,
    pair: tuple[int, int] | None = None,
    number: int | None = None,
) -> Record:
    """Matrices over all clients of the round; disentanglement error of two, the first by default.

    A client's task is to classify validation images of the classes it holds.
    """
    examples = opened.parts.validation
    if examples is None:
        raise FedlensError(f"{opened.folder.name} has no validation images (data.validation=0).")
    kept = kept_round(opened, number)
    clients = list(kept.clients)
    vectors = [task_vector(kept.start, kept.clients[client]) for client in clients]
    first, second = pair or (clients[0], clients[min(1, len(clients) - 1)])
    if first == second:
        raise FedlensError("Interference needs two different clients of one round.")
    for client in (first, second):
        if client not in clients:
            raise FedlensError(
                f"Client {client} sent nothing in round {kept.number}: it had "
                f"{', '.join(map(str, clients))}."
            )
    one, two = (vectors[clients.index(client)] for client in (first, second))
    index = [_images_of(opened, examples, client) for client in (first, second)]

    grid = {*product(alphas, alphas), *product(alphas, [0.0]), *product([0.0], alphas)}
    models, tried = len(grid) + 3, count(1)  # merged, and each alone

    def predict(parameters: Params) -> tuple[torch.Tensor, torch.Tensor]:
        opened.assign(opened.whole(parameters))
        found = predictions(
            opened.parts.model,
            examples,
            torch.cat(index),
            batch_size=opened.config.evaluate.batch_size,
            precision=opened.parts.precision,
        )
        show(next(tried), models)
        return found[: len(index[0])], found[len(index[0]) :]

    with bar("models of both clients", opened.measure.stop) as show:
        error = disentanglement(kept.start, one, two, alphas, predict)
        merged = predict(applied(kept.start, composed([(1.0, one), (1.0, two)])))
        alone = predict(applied(kept.start, one))[0], predict(applied(kept.start, two))[1]
    truth = [examples.labels.cpu()[part] for part in index]
    accuracies = [
        [(labels == right).double().mean().item() for labels, right in zip(of, truth, strict=True)]
        for of in (merged, alone)
    ]
    ratios, mean = normalised(*accuracies)
    record = {
        "kind": "interference",
        "run": opened.folder.name,
        "round": kept.number,
        "clients": clients,
        "cosine": cosine_matrix(vectors),
        "sign_conflict": sign_conflict_matrix(vectors),
        "sign_conflict_of_all": sign_conflict(vectors),
        "pair": [first, second],
        "alphas": list(alphas),
        "disentanglement_error": error.error,
        "disentanglement_error_by_task": [error.first, error.second],
        "accuracy_merged": accuracies[0],
        "accuracy_alone": accuracies[1],
        "accuracy_normalised": ratios,
        "accuracy_normalised_mean": mean,
    }
    write_json(place(opened.folder, analysis) / "record.json", record)
    return record


def _images_of(opened: OpenedRun, examples: Examples, client: int) -> torch.Tensor:
    """Where the images of a client's classes are."""
    held = opened.parts.held_classes[client] > 0
    found = held[examples.labels.cpu()].nonzero()[:, 0]
    if not len(found):
        raise FedlensError(f"No validation image is of a class that client {client} holds.")
    return found
