"""The work in fedlens: the loop of `fedlens run`, records included, with engine=auto.

Run: python benchmarks/peers/fedlens_side.py FOLDER OUT.json --rounds R
"""

import logging
import sys
from pathlib import Path

import torch
from torch import nn
from workload import BATCH, CLASSES, COHORT, Laps, Workload, arguments, report

sys.path.append(str(Path(__file__).resolve().parents[1]))

from federation import experiment, federation, rounds
from fedlens.data.examples import TensorExamples
from fedlens.data.partitions.partition import Partition
from fedlens.federated.engines.parallel import Parallel
from fedlens.models.architectures import onednn
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks


def split(net: nn.Module) -> tuple[Classifier, str]:
    """The network as a backbone and a head, and the head's name in the workload."""
    if isinstance(net, nn.Sequential):
        head = net[-1]
        return Classifier(net[:-1], head), str(len(net) - 1)
    head = net.head
    net.head = nn.Identity()
    return Classifier(net, head), "head"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keep_large_blocks()  # as every run does
    options = arguments().parse_args()
    work = Workload(options.folder)
    model, head = split(work.model())
    if onednn.is_faster():  # as every run decides
        onednn.use_onednn(model.backbone)
    clients = work.plan["clients"]
    shards = Partition(clients.flatten(), torch.arange(len(clients) + 1) * clients.shape[1])
    train = TensorExamples(work.train["inputs"], work.train["labels"])
    overrides = [
        "engine=auto",
        f"federated.participation={COHORT / len(clients)}",
        f"seed={work.about['seed']}",
        f"train.batch_size={BATCH}",
        f"train.lr={work.about['lr']}",
        f"train.optimizer.momentum={work.about['momentum']}",
        "train.optimizer.weight_decay=0",
    ]
    with federation(experiment(model, train, shards, CLASSES), overrides) as federated:
        run_round, laps = rounds(federated), Laps()
        for _ in range(options.rounds):
            run_round()
            laps.lap()
        final = {
            name.replace("head.", f"{head}.").removeprefix("backbone."): value
            for name, value in federated.server.parameters.items()
        }
        engine = federated.algorithm.engine
        processes = len(engine.workers) if isinstance(engine, Parallel) else 1
        report(
            options.out, work, final, laps,
            packages=("fedlens",), processes=processes, threads=engine.threads,
        )  # fmt: skip


if __name__ == "__main__":
    main()
