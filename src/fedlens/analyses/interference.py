"""How the clients of one round interfere: angles and signs of their updates, and how two updates
change each other's predictions. Measured on validation images; the test split stays closed.
"""

from collections.abc import Sequence
from itertools import count, product

import torch

from fedlens.analyses.client_algebra import kept_round
from fedlens.arithmetic.interference import (
    cosine_matrix,
    disentanglement,
    normalised,
    sign_conflict,
    sign_conflict_matrix,
)
from fedlens.arithmetic.task_vectors import applied, composed, task_vector
from fedlens.data.examples import Examples
from fedlens.errors import FedlensError
from fedlens.experiments.loaded_run import LoadedRun
from fedlens.params import Params
from fedlens.runtime.progress import progress_bar
from fedlens.store.analysis_records import Record, analysis_folder
from fedlens.store.records import write_record
from fedlens.training.evaluate import predictions


def interference(
    run: LoadedRun,
    name: str,
    alphas: Sequence[float],
    *,
    pair: tuple[int, int] | None = None,
    number: int | None = None,
) -> Record:
    """Matrices over all clients of the round; disentanglement error of a pair, else the first two.

    The task of a client is to classify validation images of the classes it holds.
    """
    examples = run.experiment.validation
    if examples is None:
        raise FedlensError(
            f"{run.folder.name} has no validation images: choose a run with data.validation > 0."
        )
    kept = kept_round(run, number)
    clients = list(kept.clients)
    vectors = [task_vector(kept.start, kept.clients[client]) for client in clients]
    first, second = pair or (clients[0], clients[min(1, len(clients) - 1)])
    if first == second:
        raise FedlensError("Interference needs two different clients: choose a round with several.")
    for client in (first, second):
        if client not in clients:
            raise FedlensError(
                f"Client {client} sent no update in round {kept.number}: choose from "
                f"{', '.join(map(str, clients))}."
            )
    one, two = (vectors[clients.index(client)] for client in (first, second))
    index = [_images_of(run, examples, client) for client in (first, second)]

    grid = {*product(alphas, alphas), *product(alphas, [0.0]), *product([0.0], alphas)}
    models, tried = len(grid) + 3, count(1)  # merged, and each alone

    def predict(parameters: Params) -> tuple[torch.Tensor, torch.Tensor]:
        run.assign(run.unpacked(parameters))
        labels = predictions(
            run.experiment.model,
            examples,
            torch.cat(index),
            batch_size=run.evaluator.batch_size,
            precision=run.experiment.precision,
        )
        update(next(tried), models)
        return labels[: len(index[0])], labels[len(index[0]) :]

    with progress_bar("models of both clients", run.evaluator.stop) as update:
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
        "run": run.folder.name,
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
    write_record(analysis_folder(run.folder, name) / "record.json", record)
    return record


def _images_of(run: LoadedRun, examples: Examples, client: int) -> torch.Tensor:
    """The indices of the images of a client's classes."""
    holds = run.experiment.class_counts[client] > 0
    index = holds[examples.labels.cpu()].nonzero()[:, 0]
    if not len(index):
        raise FedlensError(
            f"There are no validation images of the classes of client {client}: choose another "
            "client, or a run with a larger data.validation."
        )
    return index
