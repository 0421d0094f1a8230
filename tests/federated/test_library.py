from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import params
from fedlens.data.partitions.partition import Partition, partition
from fedlens.errors import FedlensError
from fedlens.federated import library
from fedlens.federated.client import client_stream, local_order
from fedlens.federated.library import (
    fedadam,
    fedavg,
    fedavgm,
    fedcm,
    feddyn,
    fednova,
    fedprox,
    fedyogi,
    ghbm,
    scaffold,
)
from fedlens.federated.rounds import ServerState
from fedlens.params import Params
from fedlens.rng import generator, scoped
from fedlens.runtime.threads import limited_threads
from fedlens.training.optimizers import AdamW

CLASSES, COUNT = 3, 48
OPTIONS: dict[str, Any] = {"lr": 0.1, "local_steps": 3, "batch_size": 4, "threads": 1}


def cnn() -> nn.Module:
    """A small network with BatchNorm that knows nothing of this package."""
    with scoped(generator(0, "cnn")):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(8 * 2 * 2, CLASSES),
        )
        model[1].running_mean.uniform_(-1, 1)
        model[1].running_var.uniform_(0.5, 2)
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(0, "pictures")
    inputs = torch.randn(COUNT, 3, 6, 6, generator=draw)
    return inputs, torch.randint(CLASSES, (COUNT,), generator=draw)


def six_clients() -> Partition:
    return partition(data()[1], clients=6, by="dirichlet", alpha=0.5, min_size=2)


def trained(fed: library.Federation, rounds: int = 3, **sampling: Any) -> ServerState:
    state = fed.init()
    for _ in range(rounds):
        state, _ = fed.apply(state, fed.sample(state, **{"participation": 0.5, **sampling}))
    return state


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_with_all_data_is_plain_sgd_bit_for_bit(momentum: float) -> None:
    inputs, labels = data()
    everything = Partition(torch.arange(COUNT), torch.tensor([0, COUNT]))
    options = {**OPTIONS, "local_steps": 7, "momentum": momentum}
    fed = fedavg(cnn(), (inputs, labels), everything, seed=5, **options)
    state = fed.init()

    model = cnn().eval().to(memory_format=torch.channels_last)
    for _ in range(3):
        cohort = fed.sample(state, participation=1.0)
        state, _ = fed.apply(state, cohort)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        stream = client_stream(5, cohort.tasks[0])
        with limited_threads(1):
            for index in torch.split(*local_order(COUNT, 4, 7, stream)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[index]), labels[index]).backward()
                optimizer.step()
    assert params.digest(state.parameters) == params.digest(dict(model.named_parameters()))


def test_the_order_of_updates_does_not_matter() -> None:
    fed = fedavg(cnn().double(), _double(data()), six_clients(), **OPTIONS)
    cohort = fed.sample(fed.init(), participation=1.0)
    backwards = replace(cohort, tasks=cohort.tasks[::-1])
    one, _ = fed.apply(fed.init(), cohort)
    two, _ = fed.apply(fed.init(), backwards)
    for name, value in one.parameters.items():
        torch.testing.assert_close(two.parameters[name], value, rtol=1e-12, atol=1e-12)


def _double(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].double(), pair[1]


ALGORITHMS: dict[str, Any] = {
    "fedavg": fedavg,
    "fedprox": lambda *args, **options: fedprox(*args, mu=0.1, **options),
    "scaffold": scaffold,
    "ghbm": lambda *args, **options: ghbm(*args, tau=2, **options),
    "fedcm": fedcm,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedavgm": fedavgm,
    "fedadam": lambda *args, **options: fedadam(*args, server_lr=0.01, **options),
    "fedyogi": lambda *args, **options: fedyogi(*args, server_lr=0.01, **options),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_leaves_the_model_alone_and_repeats_itself(name: str) -> None:
    model = cnn()
    before = params.digest(model.state_dict())
    fed = ALGORITHMS[name](model, data(), six_clients(), **OPTIONS)
    start = params.digest(fed.init().trained)
    first = trained(fed, min_local_steps=1)
    assert params.digest(model.state_dict()) == before
    assert model.training
    assert params.digest(fed.init().trained) == start
    again = trained(fed, min_local_steps=1)
    assert params.digest(again.parameters) == params.digest(first.parameters) != start
    assert set(first.parameters) == set(dict(model.named_parameters()))
    if name != "fedavg":
        plain = trained(fedavg(cnn(), data(), six_clients(), **OPTIONS), min_local_steps=1)
        assert params.digest(first.parameters) != params.digest(plain.parameters)


def test_masks_are_respected() -> None:
    draw = generator(0, "masks")
    model = cnn()
    masks = {
        name: torch.rand(value.shape, generator=draw) < 0.3
        for name, value in model.named_parameters()
        if value.ndim > 1
    }
    masks["0.weight"] = torch.zeros_like(masks["0.weight"])  # frozen whole
    state = trained(fedavg(model, data(), six_clients(), masks=masks, momentum=0.9, **OPTIONS))
    start = dict(model.named_parameters())
    assert "0.weight" not in state.trained
    assert torch.equal(state.parameters["0.weight"], start["0.weight"])
    for name, value in state.parameters.items():
        mask = masks.get(name, torch.ones_like(value, dtype=torch.bool))
        assert torch.equal(value[~mask], start[name][~mask])
        assert bool((value[mask] != start[name][mask]).any()) == bool(mask.any())


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"nothing": torch.ones(1, dtype=torch.bool)}, "masks names nothing"),
        ({"0.weight": torch.ones(2, dtype=torch.bool)}, "masks do not fit"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: Params, words: str) -> None:
    with pytest.raises(FedlensError, match=words):
        fedavg(cnn(), data(), six_clients(), masks=masks, **OPTIONS)


@pytest.mark.slow
def test_workers_give_the_same_bits() -> None:
    serial = trained(fedavg(cnn(), data(), six_clients(), **OPTIONS))
    with fedavg(cnn(), data(), six_clients(), engine="parallel", workers=2, **OPTIONS) as fed:
        assert params.digest(trained(fed).parameters) == params.digest(serial.parameters)


@pytest.mark.slow
def test_aggregators_are_names_rows_or_functions() -> None:
    def of(aggregator: Any) -> str:
        fed = fedavg(cnn(), data(), six_clients(), aggregator=aggregator, **OPTIONS)
        return params.digest(trained(fed).parameters)

    def first(updates: list[Params], weights: list[float]) -> Params:
        assert len(updates) == len(weights) == 3
        return updates[0]

    found = {
        of(choice)
        for choice in ("mean", "median", {"name": "trimmed_mean", "trim": 0.4}, "ties", first)
    }
    assert len(found) == 4  # the trimmed mean of three clients is their median
    assert of({"name": "mean"}) == of("mean")
    with pytest.raises(FedlensError, match="no aggregator 'meen'"):
        of("meen")


def test_other_options() -> None:
    plain = params.digest(trained(fedavg(cnn(), data(), six_clients(), **OPTIONS)).parameters)
    variants: list[dict[str, Any]] = [
        {"optimizer": AdamW()},
        {"label_smoothing": 0.1},
        {"clip_norm": 0.1},
        {"seed": 1},
    ]
    for options in variants:
        fed = fedavg(cnn(), data(), six_clients(), **{**OPTIONS, **options})
        assert params.digest(trained(fed).parameters) != plain
    fed = fedavg(cnn(), data(), six_clients(), diagnostics=["drift"], **OPTIONS)
    _, report = fed.apply(fed.init(), fed.sample(fed.init(), 0.5))
    assert list(report.diagnostics) == ["drift"]


def test_cohorts_follow_the_arguments_of_sample() -> None:
    fed = fedavg(cnn(), data(), six_clients(), **OPTIONS)
    state = fed.init()
    assert fed.sample(state, 0.5, lr=0.7).lr == 0.7
    assert fed.sample(state).drawn == fed.sample(state).drawn
    assert len(fed.sample(state).drawn) == 1
    drawn: list[int] = []
    for _ in range(3):
        cohort = fed.sample(state, 1 / 3, sampling="cyclic")
        drawn += cohort.drawn
        state, _ = fed.apply(state, cohort)
    assert sorted(drawn) == list(range(6))
    chosen = fed.sample(state, 0.5, sampling=lambda seed, round_, clients, size: [1, 4])
    assert chosen.drawn == (1, 4)


def test_what_cannot_be_is_refused() -> None:
    inputs, labels = data()
    with pytest.raises(FedlensError, match="partition is of more than the 10 examples"):
        fedavg(cnn(), (inputs[:10], labels[:10]), six_clients(), **OPTIONS)
    with pytest.raises(FedlensError, match="engine='serail' is unknown: did you mean 'serial'"):
        fedavg(cnn(), data(), six_clients(), engine="serail", **OPTIONS)
    with pytest.raises(FedlensError, match="Nothing is left to train"):
        fedavg(cnn().requires_grad_(False), data(), six_clients(), **OPTIONS)
    fed = fednova(cnn(), data(), six_clients(), optimizer=AdamW(), **OPTIONS)
    with pytest.raises(FedlensError, match=r"FedNova .* only SGD"):
        trained(fed)
