import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.federated import sampling
from fedlens.federated.client import (
    LocalTraining,
    Trainer,
    client_stream,
    in_training_layout,
    local_order,
    trainable_parameters,
)
from fedlens.federated.engines.serial import Serial
from fedlens.federated.rounds import FederatedAlgorithm
from fedlens.federated.tasks import ClientTask
from fedlens.models.classifier import Classifier
from fedlens.rng import Stream, generator
from fedlens.training.optimizers import AdamW, Sgd
from tests.federated.small import (
    answers,
    examples,
    linear,
    local_training,
    network,
    shards,
    tasks,
)

SEED = 7
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
]


def sgd(training: LocalTraining) -> dict[str, Any]:
    assert isinstance(training.optimizer, Sgd)
    return vars(training.optimizer)


def plain(
    model: Classifier,
    known: FeatureExamples,
    shard: torch.Tensor,
    asked: ClientTask,
    given: LocalTraining,
) -> tuple[dict[str, torch.Tensor], float, int]:
    """What anybody would write: a loop over batches with torch's own SGD, on a model of its own."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, **sgd(given))
    stream = client_stream(SEED, asked)
    order = local_order(len(shard), given.batch_size, asked.steps, stream)
    total, correct = 0.0, 0
    for batch in torch.split(*order):
        index = shard[batch]
        optimizer.zero_grad()
        logits = model(known.features[index])
        loss = F.cross_entropy(logits, known.labels[index], reduction="sum")
        (loss / len(index)).backward()
        optimizer.step()
        total += loss.item()
        correct += int((logits.argmax(1) == known.labels[index]).sum())
    return params.copy(dict(model.named_parameters())), total, correct


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("make", [linear, network])
def test_a_client_is_a_plain_torch_loop_bit_for_bit(make: Any, options: dict[str, Any]) -> None:
    known, given, held = examples(), local_training(**options), shards([3, 11, 26])
    trainer = Trainer(make(), known, held.shard, given, SEED)
    start = params.copy(trainer.trained)
    for asked in tasks([3, 11, 26], steps=9):  # more and less than a pass
        update = trainer.train(asked, start)
        expected, loss, correct = plain(make(), known, held.shard(asked.client), asked, given)
        assert params.digest(update.parameters) == params.digest(expected)
        assert update.tally is not None
        assert (update.tally.loss, update.tally.correct) == (loss, correct)
        assert update.fault is None


def test_an_update_depends_on_nothing_that_was_trained_before() -> None:
    """Neither on other clients, nor on a diverged one, nor on the model's values at hand."""
    given = local_training(momentum=0.9, step={"dropout": 0.3})
    shard = shards([8, 12, 20]).shard
    engine = Serial(Trainer(network(), examples(), shard, given, SEED), 1)
    start = params.copy(engine.trainer.trained)
    asked = tasks([8, 12, 20])
    forward = answers(engine, start, asked)
    assert forward == answers(engine, start, asked)
    engine.trainer.train(replace(asked[0], lr=1e38), start)
    assert forward[::-1] == answers(engine, start, asked[::-1])
    for one, expected in zip(asked, forward, strict=True):
        fresh = Serial(Trainer(network(), examples(), shard, given, SEED), 1)
        assert answers(fresh, start, [one]) == [expected]


def everything(client: int) -> torch.Tensor:
    """Every client holds all 40 examples."""
    del client
    return torch.arange(40)


def test_an_update_depends_on_seed_round_and_client() -> None:
    start = params.copy(trainable_parameters(network()))
    found = {
        params.digest(
            Trainer(network(), examples(), everything, local_training(), seed)
            .train(ClientTask(round_, client, 3, 0.1, 40), start)
            .parameters
        )
        for seed in (0, 1)
        for round_ in (1, 2)
        for client in (0, 1)
    }
    assert len(found) == 8


def test_an_update_leaves_the_parameters_it_started_from_alone() -> None:
    trainer = Trainer(network(), examples(), everything, local_training(proximal=0.1), SEED)
    start = params.copy(trainer.trained)
    before = params.digest(start)
    trainer.train(tasks([40])[0], start)
    assert params.digest(start) == before


def test_only_what_requires_a_gradient_is_trained_and_travels() -> None:
    model = network()
    model.backbone.requires_grad_(False)
    before = params.digest(dict(model.backbone.named_parameters()))
    trainer = Trainer(model, examples(), everything, local_training(weight_decay=0.1), SEED)
    update = trainer.train(tasks([40])[0], params.copy(trainer.trained))
    assert set(update.parameters) == {"head.weight", "head.bias"}
    assert params.digest(dict(model.backbone.named_parameters())) == before


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (12, 4), (3, 8), (1, 1)])
def test_batches_are_shuffled_passes_without_replacement(size: int, batch: int) -> None:
    a_pass = -(-size // batch)
    drawn = torch.split(*local_order(size, batch, 5 * a_pass, Stream(0, ("test",))))
    passes = [torch.cat(drawn[k * a_pass : (k + 1) * a_pass]) for k in range(5)]
    for one in passes:
        assert torch.equal(one.sort().values, torch.arange(size))
    assert [len(one) for one in drawn[:a_pass]][:-1] == [batch] * (a_pass - 1)
    if size >= 10:
        assert len({tuple(one.tolist()) for one in passes}) == 5


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="empty shard"):
        local_order(0, 4, 1, Stream(0, ("test",)))


def one_bias(given: LocalTraining, *, steps: int, correction: Any = None) -> torch.Tensor:
    """Two classes, one example of class 0 with x = 0: only b moves, from (0, 0), with lr 1.

    Its gradient is softmax(b) − (1, 0): first (−½, ½).
    """
    model = Classifier(nn.Identity(), nn.Linear(1, 2))
    known = FeatureExamples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    start = {"head.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2)}
    trainer = Trainer(model, known, shards([1]).shard, given, SEED)
    asked = ClientTask(1, 0, steps, 1.0, 1, correction)
    return trainer.train(asked, start).parameters["head.bias"]


def test_fedprox_pulls_back_to_where_the_client_started() -> None:
    """b₁ = (½, −½); softmax(b₁)₀ = 0.731059; with μ = ½: b₂ = ½ + 0.268941 − ½·½ = 0.518941."""
    assert one_bias(local_training(proximal=0.5), steps=1).tolist() == [0.5, -0.5]
    moved = one_bias(local_training(proximal=0.5), steps=2)
    assert moved.tolist() == pytest.approx([0.518941, -0.518941], abs=1e-6)
    assert one_bias(local_training(), steps=2).tolist() == pytest.approx(
        [0.768941, -0.768941], abs=1e-6
    )


def test_fedprox_without_mu_is_plain() -> None:
    assert torch.equal(
        one_bias(local_training(proximal=0.0), steps=5), one_bias(local_training(), steps=5)
    )


def test_scaffold_adds_its_correction_to_every_gradient() -> None:
    """b₁ = −((−½, ½) + (0.1, −0.2)) = (0.4, −0.3)."""
    correction = {
        "head.weight": torch.tensor([[0.25], [0.0]]),
        "head.bias": torch.tensor([0.1, -0.2]),
    }
    moved = one_bias(local_training(), steps=1, correction=correction)
    assert moved.tolist() == pytest.approx([0.4, -0.3], abs=1e-7)
    p = 1 / (1 + torch.tensor(-0.7).exp().item())  # softmax(b₁)₀
    again = one_bias(local_training(), steps=2, correction=correction)
    assert again.tolist() == pytest.approx([0.4 + 1 - p - 0.1, -0.3 - 1 + p + 0.2], abs=1e-6)


def test_a_gradient_is_clipped_with_its_corrections() -> None:
    correction = {"head.weight": torch.zeros(2, 1), "head.bias": torch.tensor([3.5, 3.5])}
    moved = one_bias(local_training(step={"clip_norm": 1.0}), steps=1, correction=correction)
    assert moved.tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)  # −(3, 4)/5


@pytest.mark.parametrize("cause", ["lr", "inputs"])
def test_a_client_that_diverges_says_so_and_the_next_one_is_unhurt(cause: str) -> None:
    known, shard = examples(), shards([8, 32]).shard
    if cause == "inputs":
        known.features[3, 2] = float("nan")
    trainer = Trainer(network(), known, shard, local_training(momentum=0.9), SEED)
    start = params.copy(trainer.trained)
    bad = ClientTask(1, 0, 20, 1e38 if cause == "lr" else 0.1, 8)
    update = trainer.train(bad, start)
    assert update.fault
    assert "The loss became" in update.fault
    good = ClientTask(1, 1, 5, 0.1, 32)
    fresh = Trainer(network(), known, shard, local_training(momentum=0.9), SEED)
    expected = params.digest(fresh.train(good, start).parameters)
    assert params.digest(trainer.train(good, start).parameters) == expected


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_one_client_that_holds_everything_is_central_sgd_bit_for_bit(
    options: dict[str, Any],
) -> None:
    known, given, model = examples(), local_training(batch_size=8, **options), network()
    central = copy.deepcopy(model)
    trainer = Trainer(model, known, everything, given, SEED)
    algorithm = FederatedAlgorithm(Serial(trainer, 1), given, bad_update="raise", seed=SEED)
    state = algorithm.init(trainer.trained)
    for round_ in (1, 2):
        cohort = sampling.draw_cohort(SEED, round_, [40], size=1, lr=0.1, local_steps=13)
        assert cohort.drawn == (0,)
        state, _ = algorithm.apply(state, cohort)
        expected, _, _ = plain(central, known, torch.arange(40), cohort.tasks[0], given)
        params.assign(dict(central.named_parameters()), expected)
        assert params.digest(state.trained) == params.digest(expected)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_effective_steps_are_how_far_a_constant_gradient_carries(
    steps: int, momentum: float, nesterov: bool
) -> None:
    nesterov = nesterov and momentum > 0
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    given = local_training(momentum=momentum, nesterov=nesterov)
    assert given.effective_steps(steps) == pytest.approx(-w.item(), rel=1e-9)


def test_serial_sets_its_threads_while_a_client_trains_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    trainer = Trainer(linear(), examples(), everything, local_training(), SEED)
    engine = Serial(trainer, before + 1)
    during = []
    monkeypatch.setattr(engine.trainer, "train", lambda *_: during.append(torch.get_num_threads()))
    for _ in engine.updates({}, tasks([20, 20])):
        assert torch.get_num_threads() == before
    assert during == [before + 1] * 2
    engine.close()


def half_masks(model: Classifier) -> dict[str, torch.Tensor]:
    """About half of every backbone weight."""
    draw = generator(0, "half")
    return {
        name: torch.rand(value.shape, generator=draw) < 0.5
        for name, value in model.named_parameters()
        if name.startswith("backbone.")
    }


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_masks_that_are_all_true_change_nothing(options: dict[str, Any]) -> None:
    whole = {
        name: torch.ones_like(value, dtype=torch.bool)
        for name, value in half_masks(network()).items()
    }
    given, shard = local_training(**options), shards([20]).shard
    dense = Trainer(network(), examples(), shard, given, SEED)
    masked = Trainer(network(), examples(), shard, given, SEED, masks=whole)
    (asked,) = tasks([20], steps=9)
    update = masked.train(asked, params.copy(masked.packed()))
    expected = dense.train(asked, params.copy(dense.packed()))
    shaped = {n: v.view(expected.parameters[n].shape) for n, v in update.parameters.items()}
    assert params.digest(shaped) == params.digest(expected.parameters)


@pytest.mark.parametrize(
    "options",
    [*OPTIMIZERS, {"proximal": 0.5}, {"step": {"clip_norm": 0.01}, "momentum": 0.9}],
)
def test_under_masks_a_client_is_a_plain_loop_that_puts_frozen_entries_back(
    options: dict[str, Any],
) -> None:
    model, given = network(), local_training(**options)
    masks = half_masks(model)
    trainer = Trainer(model, examples(), shards([30]).shard, given, SEED, masks=masks)
    start, whole = params.copy(trainer.packed()), params.copy(dict(network().named_parameters()))
    (asked,) = tasks([30], steps=9)
    correction = {name: torch.full_like(value, 0.01) for name, value in start.items()}
    update = trainer.train(replace(asked, correction=correction), start)

    reference = network()
    named = dict(reference.named_parameters())
    optimizer = torch.optim.SGD(named.values(), lr=asked.lr, **sgd(given))
    stream = client_stream(SEED, asked)
    for batch in torch.split(*local_order(30, given.batch_size, 9, stream)):
        index = torch.arange(30)[batch]
        optimizer.zero_grad()
        F.cross_entropy(reference(examples().features[index]), examples().labels[index]).backward()
        with torch.no_grad():
            for name, value in named.items():
                value.grad += given.proximal * (value - whole[name]) + 0.01
                value.grad *= masks.get(name, 1)
            if given.step.clip_norm:
                nn.utils.clip_grad_norm_(named.values(), given.step.clip_norm)
            optimizer.step()
            for name, mask in masks.items():
                named[name].copy_(torch.where(mask, named[name], whole[name]))
    for name, value in named.items():
        found = trainer.packing.taken(name, value.detach())
        torch.testing.assert_close(update.parameters[name], found, rtol=1e-5, atol=1e-6)
        if name in masks:
            live = trainer.trained[name]
            assert torch.equal(live[~masks[name]], whole[name][~masks[name]])
            assert len(update.parameters[name]) == int(masks[name].sum())


def test_an_optimizer_without_effective_steps_says_none() -> None:
    given = replace(local_training(), optimizer=AdamW())
    assert given.effective_steps(3) is None


def test_clients_train_with_adamw_from_empty_moments() -> None:
    given = replace(local_training(), optimizer=AdamW())
    trainer = Trainer(network(), examples(), everything, given, SEED)
    start = params.copy(trainer.trained)
    (asked,) = tasks([40])
    first = params.digest(trainer.train(asked, start).parameters)
    assert params.digest(trainer.train(asked, start).parameters) == first


def test_a_plain_module_trains_and_dropout_before_its_head_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    trainer = Trainer(model, examples(), everything, local_training(), SEED)
    assert trainer.train(tasks([40])[0], params.copy(trainer.packed())).fault is None
    with pytest.raises(FedlensError, match="linear layer called `head`"):
        Trainer(model, examples(), everything, local_training(step={"dropout": 0.1}), SEED)


def test_volumes_keep_their_layout_where_convolutions_change_theirs() -> None:
    model = nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)])
    in_training_layout(model)
    flat, deep = (layer.weight for layer in model)
    assert flat.is_contiguous(memory_format=torch.channels_last)
    assert deep.is_contiguous()
