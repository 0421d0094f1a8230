"""GHBM, FedCM and FedDyn against slow, obvious code, and where they are something simpler."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import params
from fedlens.data.partitions.partition import Partition, partition
from fedlens.errors import FedlensError
from fedlens.federated import wire
from fedlens.federated.algorithms.fedcm import FedCM
from fedlens.federated.algorithms.feddyn import FedDyn
from fedlens.federated.algorithms.ghbm import GHBM
from fedlens.federated.client import Trainer, client_stream, local_order
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.library import Federation, fedavg, fedcm, feddyn, ghbm
from fedlens.federated.rounds import RoundReport, ServerState
from fedlens.federated.tasks import ClientTask, Cohort
from fedlens.rng import generator, scoped
from fedlens.training.optimizers import AdamW
from tests.federated.small import CLASSES, WIDTH, examples, kept, linear, local_training, shards
from tests.federated.small import tasks as small_tasks

CLIENTS, COUNT, LR, STEPS, ROUNDS = 4, 36, 0.1, 3, 6
OPTIONS: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": 4, "threads": 1}
Weights = dict[str, torch.Tensor]
FUNCTIONS: dict[str, Callable[..., Federation]] = {
    "ghbm": lambda *given, **options: ghbm(*given, tau=2, beta=0.8, **options),
    "fedcm": lambda *given, **options: fedcm(*given, alpha=0.3, **options),
    "feddyn": lambda *given, **options: feddyn(*given, alpha=0.2, **options),
}


def model() -> nn.Module:
    with scoped(generator(0, "linear")):
        return nn.Linear(WIDTH, CLASSES).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    given = examples(COUNT)
    return given.features.double(), given.labels


def clients() -> Partition:
    return partition(data()[1], clients=CLIENTS, by="dirichlet", alpha=0.5, min_size=3)


def rounds(
    fed: Federation, count: int = ROUNDS, **sampling: Any
) -> tuple[ServerState, list[Cohort], list[RoundReport]]:
    state, cohorts, reports = fed.init(), [], []
    for _ in range(count):
        cohort = fed.sample(state, **{"participation": 0.5, **sampling})
        state, report = fed.apply(state, cohort)
        cohorts.append(cohort)
        reports.append(report)
    return state, cohorts, reports


def trained(name: str, *given: Any, **options: Any) -> Weights:
    fed = FUNCTIONS[name](*given, **{**OPTIONS, **options})
    return rounds(fed)[0].parameters


# --- slow code: one tensor at a time, every model of every round kept ----------------------------


def gradient(weights: Weights, task: ClientTask, step: int) -> Weights:
    inputs, labels = data()
    shard = clients().shard(task.client)
    order, sizes = local_order(len(shard), 4, task.steps, client_stream(0, task))
    index = shard[torch.split(order, sizes)[step]]
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    F.cross_entropy(F.linear(inputs[index], **leaves), labels[index]).backward()
    return {name: value.grad for name, value in leaves.items() if value.grad is not None}


def minus(one: Weights, other: Weights) -> Weights:
    return {name: value - other[name] for name, value in one.items()}


def weighted_mean(models: Sequence[Weights], tasks: Sequence[ClientTask]) -> Weights:
    total = sum(task.examples for task in tasks)
    mean = params.zeros_like(models[0])
    for one, task in zip(models, tasks, strict=True):
        mean = {n: v + one[n] * (task.examples / total) for n, v in mean.items()}
    return mean


def slow_ghbm(cohorts: Sequence[Cohort], tau: int, beta: float) -> Weights:
    """w ← w − η·g + β·(w^t − w^(t−τ))/(τ·J)."""
    history = [params.copy(dict(model().named_parameters()))]
    for cohort in cohorts:
        now, then = history[-1], history[max(0, len(history) - 1 - tau)]
        momentum = {name: value / tau for name, value in minus(now, then).items()}
        ends = []
        for task in cohort.tasks:
            w = params.copy(now)
            for step in range(task.steps):
                g = gradient(w, task, step)
                w = {n: v - LR * g[n] + beta * momentum[n] / task.steps for n, v in w.items()}
            ends.append(w)
        history.append(weighted_mean(ends, cohort.tasks))
    return history[-1]


def slow_fedcm(cohorts: Sequence[Cohort], alpha: float, lr: float = LR) -> Weights:
    """w ← w − η·(α·g + (1 − α)·Δ), Δ the last change over −η·J."""
    now = params.copy(dict(model().named_parameters()))
    direction = params.zeros_like(now)
    for cohort in cohorts:
        ends = []
        for task in cohort.tasks:
            w = params.copy(now)
            for step in range(task.steps):
                g = gradient(w, task, step)
                w = {n: v - lr * (alpha * g[n] + (1 - alpha) * direction[n]) for n, v in w.items()}
            ends.append(w)
        after = weighted_mean(ends, cohort.tasks)
        direction = {n: v / (lr * STEPS) for n, v in minus(now, after).items()}
        now = after
    return now


def slow_feddyn(cohorts: Sequence[Cohort], alpha: float) -> tuple[Weights, Weights]:
    """The paper's algorithm 1, but with means by numbers of examples; the model, and h."""
    now = params.copy(dict(model().named_parameters()))
    duals = [params.zeros_like(now) for _ in range(CLIENTS)]
    h = params.zeros_like(now)
    for cohort in cohorts:
        ends = []
        for task in cohort.tasks:
            w, dual = params.copy(now), duals[task.client]
            for step in range(task.steps):
                g = gradient(w, task, step)
                w = {n: v - LR * (g[n] - dual[n] + alpha * (v - now[n])) for n, v in w.items()}
            duals[task.client] = {n: dual[n] - alpha * (v - now[n]) for n, v in w.items()}
            ends.append(w)
        for end in ends:
            h = {n: v - alpha / CLIENTS * (end[n] - now[n]) for n, v in h.items()}
        mean = weighted_mean(ends, cohort.tasks)
        now = {n: v - h[n] / alpha for n, v in mean.items()}
    return now, h


def close(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tau", [1, 2, 3, 10])
def test_ghbm_is_its_formula(tau: int) -> None:
    fed = ghbm(model(), data(), clients(), tau=tau, beta=0.8, **OPTIONS)
    state, cohorts, _ = rounds(fed, sampling="cyclic")
    close(state.parameters, slow_ghbm(cohorts, tau, 0.8))
    assert len(state.correction) == min(tau, ROUNDS)


@pytest.mark.parametrize("least", [None, 1])
def test_ghbm_divides_by_each_client_s_own_steps(least: int | None) -> None:
    fed = ghbm(model(), data(), clients(), tau=2, beta=0.5, **OPTIONS)
    state, cohorts, _ = rounds(fed, min_local_steps=least)
    close(state.parameters, slow_ghbm(cohorts, 2, 0.5))


def test_fedcm_is_its_formula() -> None:
    state, cohorts, _ = rounds(fedcm(model(), data(), clients(), alpha=0.3, **OPTIONS))
    close(state.parameters, slow_fedcm(cohorts, 0.3))


def test_feddyn_is_its_formula() -> None:
    state, cohorts, _ = rounds(feddyn(model(), data(), clients(), alpha=0.2, **OPTIONS))
    slow, h = slow_feddyn(cohorts, 0.2)
    close(state.parameters, slow)
    close(state.correction["h"], h)


def test_feddyn_s_h_is_the_mean_of_all_clients_states() -> None:
    state, _, _ = rounds(feddyn(model(), data(), clients(), alpha=0.2, **OPTIONS))
    assert state.clients is not None
    states = [state.clients.get(client) for client in range(CLIENTS)]
    for name, value in state.correction["h"].items():
        total = sum((one[name] for one in states if one), start=torch.zeros_like(value))
        torch.testing.assert_close(value, total / CLIENTS, rtol=1e-10, atol=1e-12)


def test_feddyn_finds_the_common_optimum_where_averaging_does_not() -> None:
    """Clients with a(w − b)²/2 and many steps; Σ a·b/Σ a = 0. By the round's own objects."""
    curvature, centre = (1.0, 4.0, 0.5), (3.0, -1.0, 2.0)

    def end(correction: FedDyn | None) -> float:
        w = {"w": torch.zeros(1, dtype=torch.float64)}
        memory = correction.init(w) if correction else {}
        states: dict[int, Any] = {}
        for _ in range(300):
            ends = []
            round_ = correction.begin(memory, w) if correction else None
            for client, (a, b) in enumerate(zip(curvature, centre, strict=True)):
                term = correction.term(memory, w, states.get(client), None) if correction else None
                y, mu = w["w"], correction.proximal if correction else 0.0
                for _ in range(10):
                    y = y - 0.1 * (a * (y - b) + mu * (y - w["w"]) + (term["w"] if term else 0.0))
                ends.append(y)
                if round_:
                    task = ClientTask(1, client, 10, 0.1, 1, correction=term)
                    round_.add(task, w, {"w": y}, None)
            change = {"w": torch.stack(ends).mean(0) - w["w"]}
            if round_:
                after = round_.result(change, 3)
                change, memory = dict(after.change), after.memory
                states |= after.clients
            w = {"w": w["w"] + change["w"]}
        return w["w"].item()

    assert end(FedDyn(alpha=1.0)) == pytest.approx(0.0, abs=1e-6)
    assert abs(end(None)) > 0.1


# --- where they are something simpler ------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_momentum_and_only_own_gradients_are_fedavg_bit_for_bit(momentum: float) -> None:
    given = (model().float(), (data()[0].float(), data()[1]), clients())
    options = {**OPTIONS, "momentum": momentum}
    plain = rounds(fedavg(*given, **options))[0]
    for fed in (ghbm(*given, tau=2, beta=0.0, **options), fedcm(*given, alpha=1.0, **options)):
        assert params.digest(rounds(fed)[0].parameters) == params.digest(plain.parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ghbm_over_one_round_is_fedcm_at_another_learning_rate(momentum: float) -> None:
    """Both add (1 − α) of the last change to a round, and move by the same share of gradients."""
    alpha, options = 0.4, {**OPTIONS, "momentum": momentum}
    given = (model(), data(), clients())
    heavy_ball = rounds(ghbm(*given, tau=1, beta=1 - alpha, **options))[0]
    mixed = rounds(fedcm(*given, alpha=alpha, **{**options, "lr": LR / alpha}))[0]
    close(heavy_ball.parameters, mixed.parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_adds_beta_times_the_momentum_whatever_the_optimizer(momentum: float) -> None:
    """At a constant gradient of 0: all that moves a client is the momentum."""
    local = local_training(momentum=momentum)
    correction, now = GHBM(beta=0.8, tau=2), {"w": torch.tensor([3.0, 1.0])}
    memory = {"000000": {"w": torch.tensor([1.0, 2.0])}}
    term = correction.term(memory, now, None, local.scale(STEPS, LR))
    w = now["w"].clone().requires_grad_()
    optimizer = local.optimizer.make([("w", nn.Parameter(w.detach()))], None, lr=LR)
    (moving,) = optimizer.param_groups[0]["params"]
    for _ in range(STEPS):
        moving.grad = term["w"].clone()
        optimizer.step()
    torch.testing.assert_close(moving.data - now["w"], 0.8 * torch.tensor([1.0, -0.5]))


# --- masks, engines, bytes, refusals -------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_train_as_if_frozen_entries_were_not_there(name: str) -> None:
    """Packed terms: the trained column moves as that of a model whose other inputs are offsets."""
    inputs, labels = data()
    mask = torch.zeros(CLASSES, WIDTH, dtype=torch.bool)
    mask[:, 1:3] = True
    start = dict(model().named_parameters())

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(start["weight"].detach()[:, 1:3].clone())
            self.bias = nn.Parameter(start["bias"].detach().clone())
            self.register_buffer("rest", start["weight"].detach() * ~mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x[:, 1:3], self.weight, self.bias) + F.linear(x, self.rest)

    masked = trained(name, model(), (inputs, labels), clients(), masks={"weight": mask})
    narrow = trained(name, Narrow(), (inputs, labels), clients())
    torch.testing.assert_close(masked["weight"][:, 1:3], narrow["weight"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(masked["bias"], narrow["bias"], rtol=1e-9, atol=1e-11)
    assert torch.equal(masked["weight"][~mask], start["weight"][~mask])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_workers_give_the_same_bits(name: str) -> None:
    given = (model().float(), (data()[0].float(), data()[1]), clients())
    serial = rounds(FUNCTIONS[name](*given, **OPTIONS), 3)[0]
    with FUNCTIONS[name](*given, engine="parallel", workers=2, **OPTIONS) as fed:
        assert params.digest(rounds(fed, 3)[0].parameters) == params.digest(serial.parameters)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_heads_side_by_side_scale_their_gradients_too(scale: float) -> None:
    sizes = [6, 10, 4]
    local = local_training(momentum=0.5, gradient_scale=scale, proximal=0.1)
    trainer = Trainer(linear(), examples(), shards(sizes).shard, local, 7)
    draw = generator(0, "terms")
    asked = [
        replace(
            task,
            correction={
                name: torch.randn(value.shape, generator=draw)
                for name, value in trainer.packed().items()
            },
        )
        for task in small_tasks(sizes)
    ]
    start = params.copy(trainer.packed())
    names = tuple(start)
    assert len(names) == 2
    one_by_one = kept(Serial(trainer, 1), start, asked)
    together = Vectorised(examples(), shards(sizes).shard, local, 7, 1, names=(names[0], names[1]))
    for one, other in zip(one_by_one, kept(together, start, asked), strict=True):
        for name, value in one.parameters.items():
            torch.testing.assert_close(value, other.parameters[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_terms_travel_down_and_nothing_more_travels_up(name: str) -> None:
    state, _, reports = rounds(FUNCTIONS[name](model(), data(), clients(), **OPTIONS), 2)
    for report in reports:
        assert report.bytes_down == 2 * 2 * wire.size(state.trained)
        assert report.bytes_up == 2 * wire.size(state.trained)


def test_clients_without_states_share_one_term() -> None:
    fed = fedcm(model(), data(), clients(), **OPTIONS)
    tasks = fed.algorithm._tasks(fed.sample(fed.init(), 1.0), fed.init())
    assert len({id(task.correction) for task in tasks}) == 1
    with_states = feddyn(model(), data(), clients(), **OPTIONS)
    tasks = with_states.algorithm._tasks(fed.sample(fed.init(), 1.0), with_states.init())
    assert len({id(task.correction) for task in tasks}) == CLIENTS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_state_is_not_changed_by_its_round(name: str) -> None:
    fed = FUNCTIONS[name](model(), data(), clients(), **OPTIONS)
    state, _, _ = rounds(fed, 3)
    cohort = fed.sample(state, 0.5)

    def contents(of: ServerState) -> list[str]:
        return [params.digest(of.trained), *map(params.digest, of.correction.values())]

    before = contents(state)
    one, two = fed.apply(state, cohort)[0], fed.apply(state, cohort)[0]
    assert contents(state) == before != contents(one)
    assert contents(one) == contents(two)


def test_adamw_has_no_effective_steps_and_feddyn_needs_none() -> None:
    given = (model(), data(), clients())
    options = {**OPTIONS, "optimizer": AdamW()}
    with pytest.raises(FedlensError, match=r"GHBM divides updates by .* only SGD"):
        ghbm(*given, tau=2, **options).init()
    with pytest.raises(FedlensError, match=r"FedCM divides updates by .* only SGD"):
        fedcm(*given, **options).init()
    state, _, _ = rounds(feddyn(*given, **options))
    assert all(bool(value.isfinite().all()) for value in state.parameters.values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda *given: ghbm(*given, tau=0, **OPTIONS), "tau=0 must be 1 or more"),
        (lambda *given: ghbm(*given, tau=2, beta=1.0, **OPTIONS), r"beta=1.0 must be in \[0, 1\)"),
        (lambda *given: fedcm(*given, alpha=0.0, **OPTIONS), r"alpha=0.0 must be in \(0, 1\]"),
        (lambda *given: feddyn(*given, alpha=0.0, **OPTIONS), "alpha=0.0 must be positive"),
        (lambda *given: feddyn(*given, aggregator="median", **OPTIONS), "leave aggregator out"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[..., Federation], words: str) -> None:
    with pytest.raises(FedlensError, match=words):
        make(model(), data(), clients())


def test_constants_that_clients_train_with() -> None:
    local = local_training(proximal=0.5)
    assert local.corrected(None) == local
    assert local.corrected(GHBM(tau=1)) == local
    assert local.corrected(FedCM(alpha=0.3)) == replace(local, gradient_scale=0.3)
    assert local.corrected(FedDyn(alpha=0.25)) == replace(local, proximal=0.75)
