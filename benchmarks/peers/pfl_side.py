"""The work by Apple's pfl-research: FederatedAveraging on its SimulatedBackend.

Run: .envs/pfl/bin/python benchmarks/peers/pfl_side.py FOLDER OUT.json --rounds R
"""

import os
import socket
import subprocess
import sys
import types
from itertools import chain, product

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import BATCH, COHORT, Laps, Workload, arguments, report


def loss(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(inputs), labels)


@torch.no_grad()
def metrics(net: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
    """pfl evaluates every user in its first round, whatever one asks; that one warms up."""
    return {"loss": Weighted(float(loss(net, inputs, labels)) * len(labels), len(labels))}


def federated(work: Workload, rounds: int) -> FederatedDataset:
    """A user is a client in a round, its examples in the order of its batches."""
    numbers = range(1, rounds + 1)
    users = chain.from_iterable(product([number], work.cohort(number)) for number in numbers)

    def examples(user: tuple[int, int]) -> PyTorchTensorDataset:
        index = work.batches(*user).flatten()
        return PyTorchTensorDataset((work.train["inputs"][index], work.train["labels"][index]))

    return FederatedDataset(examples, lambda: next(users))


class Clock(TrainingProcessCallback):
    """A lap per round."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        del model
        self.laps = Laps()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        del aggregate_metrics, model, central_iteration
        self.laps.lap()
        return False, Metrics()


def main() -> None:
    parser = arguments()
    parser.add_argument("--workers", type=int, default=1, help="processes that share a cohort")
    options = parser.parse_args()
    if options.workers > 1 and "PFL_WORKER_RANK" not in os.environ:
        sys.exit(share(options.workers))
    work = Workload(options.folder)
    work.train, work.plan  # noqa: B018  (read before the clock starts)
    net = work.model()
    net.loss = types.MethodType(loss, net)
    net.metrics = types.MethodType(metrics, net)
    data = federated(work, options.rounds)
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=options.rounds,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            net,
            local_optimizer_create=lambda parameters, lr: torch.optim.SGD(
                parameters, lr=lr, momentum=work.about["momentum"]
            ),
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=work.about["lr"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        report(
            options.out, work, net.state_dict(), clock.laps,
            packages=("pfl",), processes=options.workers, threads=torch.get_num_threads(),
        )  # fmt: skip


def share(workers: int) -> int:
    """Runs this script once for each worker, as pfl's guide to fast simulations does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        first = free.getsockname()[1]
    environment = {
        **os.environ,
        "PFL_WORKER_ADDRESSES": ",".join(f"localhost:{first + rank}" for rank in range(workers)),
        "OMP_NUM_THREADS": str(max(1, os.cpu_count() // workers)),
    }
    children = [
        subprocess.Popen(sys.orig_argv, env={**environment, "PFL_WORKER_RANK": str(i)})
        for i in range(workers)
    ]
    return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    main()
