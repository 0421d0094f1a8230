import pytest
import torch

from fedlens import rng
from fedlens.config.compose import compose
from fedlens.data.examples import FeatureExamples
from fedlens.experiments.local_data import partition_of
from fedlens.experiments.trained_head import trained_head
from fedlens.federated import sampling
from fedlens.federated.client import Task, Trainer
from fedlens.models import heads
from fedlens.models.classifier import Classifier
from fedlens.runtime.stop import StopRequest
from tests.federated.worlds import FP32, rules

WIDTH, CLASSES = 6, 3


def world() -> FeatureExamples:
    draw = rng.generator(0, "world")
    labels = torch.arange(60) % CLASSES
    return FeatureExamples(torch.randn(60, WIDTH, generator=draw) + labels[:, None], labels)


TOLD = ["head=trained", "head.steps=12", "head.lr=0.1", "train.batch_size=8"]


def head() -> torch.nn.Linear:
    return heads.linear(WIDTH, CLASSES, 0)


def test_a_central_head_is_one_stretch_of_sgdm_on_all_features() -> None:
    config = compose("sparse_centralized", TOLD)
    found, facts = trained_head(config, world(), head(), None, FP32, StopRequest())
    seed = rng.address(0, "trained head")
    given = rules(8, momentum=config.train.momentum, weight_decay=config.train.weight_decay)
    trainer = Trainer(Classifier(torch.nn.Identity(), head()), world(), given, seed)
    update = trainer.train(Task(1, 0, torch.arange(60), 12, 0.1), dict(trainer.packed()))
    torch.testing.assert_close(found.weight.detach(), update.parameters["head.weight"])
    torch.testing.assert_close(found.bias.detach(), update.parameters["head.bias"])
    assert facts == {}


def test_a_federated_head_is_fedavg_on_the_clients_features() -> None:
    config = compose(
        "sparse_fedavg",
        [
            *TOLD,
            "federated.clients=5",
            "federated.participation=0.4",
            "partition=classes",
            "partition.classes_per_client=2",
        ],
    )
    examples = world()
    shards = partition_of(config, examples.labels)
    assert shards is not None
    found, facts = trained_head(config, examples, head(), shards, FP32, StopRequest())

    seed = rng.address(0, "trained head")
    given = rules(8, momentum=config.train.momentum, weight_decay=config.train.weight_decay)
    trainer = Trainer(Classifier(torch.nn.Identity(), head()), examples, given, seed)
    current = {name: value.clone() for name, value in trainer.packed().items()}
    for number in (1, 2, 3):  # 12 steps, 4 a round
        total, running = 0, {name: torch.zeros_like(value) for name, value in current.items()}
        for client in sampling.cohort(seed, number, clients=5, size=2):
            shard = shards.shard(client)
            update = trainer.train(Task(number, client, shard, 4, 0.1), current)
            total += len(shard)
            for name, value in update.parameters.items():
                running[name] += len(shard) * value
        current = {name: value / total for name, value in running.items()}
    torch.testing.assert_close(found.weight.detach(), current["head.weight"])
    torch.testing.assert_close(found.bias.detach(), current["head.bias"])
    assert facts["head_rounds"] == 3
    assert facts["head_bytes_up"] > 3 * 2 * 4 * (WIDTH + 1) * CLASSES


def test_the_same_seed_gives_the_same_head_and_another_seed_another() -> None:
    digests = []
    for seed in (0, 0, 1):
        config = compose("sparse_centralized", [*TOLD, f"seed={seed}"])
        found, _ = trained_head(config, world(), head(), None, FP32, StopRequest())
        digests.append(found.weight.sum().item())
    assert digests[0] == digests[1] != pytest.approx(digests[2], abs=1e-9)
