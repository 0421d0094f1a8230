from typing import Any

import pytest
import torch
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier
from fedlens.registry import client_optimizer
from fedlens.sparse.optimizers.sparse_adamw import SparseAdamW
from fedlens.sparse.optimizers.sparse_sgd import SparseSGDM
from fedlens.store import model_state
from fedlens.training.optimizers import AdamW, ClientOptimizer, CountsEffectiveSteps, Sgd, fuse

OPTIMIZERS: list[ClientOptimizer] = [Sgd(), Sgd(momentum=0.0), Sgd(nesterov=True), AdamW()]
MASK = {"head.weight": torch.tensor([[True, False], [False, True]])}


def small() -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Linear(3, 2), nn.Linear(2, 2))


def train(model: Classifier, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def test_rows_have_names_labels_and_parameters() -> None:
    assert [(row.name, row.label, row.traits["effective_steps"]) for row in client_optimizer] == [
        ("sgd", "SGD", True),
        ("adamw", "AdamW", False),
    ]
    sgd = client_optimizer.settings({"name": "sgd", "momentum": 0}, "train.optimizer")
    assert sgd == {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    assert client_optimizer["sgd"].make(**sgd.parameters) == Sgd(momentum=0.0)
    assert client_optimizer["adamw"].make(beta1=0.5) == AdamW(beta1=0.5)
    with pytest.raises(FedlensError, match=r"beta2=1\.0 must be in \[0, 1\)"):
        client_optimizer.settings({"name": "adamw", "beta2": 1.0}, "train.optimizer")


@pytest.mark.parametrize(
    ("one", "dense", "sparse", "expected"),
    [
        (
            Sgd(momentum=0.8, weight_decay=0.01, nesterov=True),
            torch.optim.SGD,
            SparseSGDM,
            {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True, "dampening": 0},
        ),
        (
            AdamW(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1),
            torch.optim.AdamW,
            SparseAdamW,
            {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
        ),
    ],
)
def test_it_is_torch_s_without_masks_and_sparse_with_them(
    one: ClientOptimizer, dense: type, sparse: type, expected: dict[str, Any]
) -> None:
    model = small()
    model.backbone.requires_grad_(False)
    for masks, kind in ((None, dense), ({}, dense), (MASK, sparse)):
        optimizer = one.make(model.named_parameters(), masks, lr=0.1)
        assert type(optimizer) is kind
        (group,) = optimizer.param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in model.head.parameters()]
        assert {key: group[key] for key in expected} == expected


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(FedlensError, match="needs momentum > 0"):
        Sgd(momentum=0.0, nesterov=True)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_effective_steps_are_how_far_a_constant_gradient_moves(
    momentum: float, nesterov: bool, steps: int
) -> None:
    one = Sgd(momentum=momentum, nesterov=nesterov and momentum > 0)
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = one.make([("w", weight)], None, lr=1.0)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert one.effective_steps(steps) == pytest.approx(-weight.item())
    assert isinstance(one, CountsEffectiveSteps)
    assert not isinstance(AdamW(), CountsEffectiveSteps)


@pytest.mark.parametrize("one", OPTIMIZERS)
@pytest.mark.parametrize("masks", [None, MASK])
def test_a_checkpoint_of_any_of_them_resumes_bit_for_bit(
    one: ClientOptimizer, masks: dict[str, torch.Tensor] | None
) -> None:
    whole, cut, resumed = small(), small(), small()
    for model in (whole, cut, resumed):
        model.backbone.requires_grad_(masks is None)
    made = {model: one.make(model.named_parameters(), masks, lr=0.1) for model in (whole, cut)}
    train(whole, made[whole], range(6))
    train(cut, made[cut], range(3))
    tensors = model_state.state_tensors(cut, made[cut])
    optimizer = one.make(resumed.named_parameters(), masks, lr=0.1)
    model_state.load_state(tensors, resumed, optimizer)
    train(resumed, optimizer, range(3, 6))
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("row", "masks"), [*((row, None) for row in OPTIMIZERS), (Sgd(), MASK)], ids=str
)
def test_a_fused_optimizer_takes_the_same_steps_up_to_rounding(
    row: ClientOptimizer, masks: dict[str, torch.Tensor] | None
) -> None:
    plain, fused = small(), small()
    optimizers = [row.make(model.named_parameters(), masks, lr=0.1) for model in (plain, fused)]
    assert fuse(optimizers[1])
    for start in (0, 4):  # a second client, whose momentum begins at 0
        for model, optimizer in zip((plain, fused), optimizers, strict=True):
            optimizer.state.clear()
            train(model, optimizer, range(start, start + 4))
    assert (fused.head.weight != small().head.weight).any()
    for expected, actual in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_other_optimizers_and_other_types_are_not_fused() -> None:
    model = small()
    assert not fuse(AdamW().make(model.named_parameters(), MASK, lr=0.1))
    assert not fuse(Sgd().make(model.double().named_parameters(), None, lr=0.1))
