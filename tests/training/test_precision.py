import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from fedlens.errors import FedlensError
from fedlens.sparse.optimizers.sparse_sgd import SparseSGDM
from fedlens.training import precision
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, train_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _not_probed() -> None:
    precision.probe.cache_clear()


def test_fp32_is_plain() -> None:
    chosen = precision.choose("fp32", CPU)
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert chosen.scaler is None


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(FedlensError, match="did you mean 'fp32'"):
        precision.choose("fp3", CPU)


@pytest.mark.slow
def test_amp_works_or_is_refused_but_never_kills() -> None:
    """On a CPU whose bfloat16 units are broken the child dies, not the caller."""
    try:
        chosen = precision.choose("amp", CPU)
    except FedlensError as error:
        assert "use precision=fp32" in str(error)
    else:
        with chosen.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_child_that_dies_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=-signal.SIGILL, stderr="")

    monkeypatch.setattr(subprocess, "run", dies)
    with pytest.raises(FedlensError, match=r"kills the process with SIGILL.*precision=fp32"):
        precision.choose("amp", CPU)


@pytest.mark.slow
def test_a_child_that_fails_is_quoted() -> None:
    assert "fails" in (precision.probe("nowhere", torch.bfloat16) or "")


def test_half_precision_is_tried_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def works(*args: object, **options: object) -> SimpleNamespace:
        tried.append(args)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", works)
    for _ in range(2):
        precision.choose("amp", CPU)
    assert len(tried) == 1


def float16(loss_scale: float = 65536.0) -> Precision:
    """As on a GPU without bfloat16, with the arithmetic of the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
    return Precision("amp", "cpu", torch.float16, scaler)


def test_a_client_whose_gradients_overflow_does_not_change_the_scale_of_the_next() -> None:
    clients = float16().for_clients()
    assert clients.scaler is not None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for gradient in (float("inf"), 2.0):
        weight.grad = torch.tensor([gradient]) * clients.scaler.scale(torch.ones(1))
        clients.scaler.step(optimizer)
        clients.scaler.update()
        assert clients.scaler.get_scale() == 1024.0
    assert weight.item() == 0.0  # the first step was left out, the second is 0.5 · 2


def test_a_sparse_step_in_float16_is_that_of_float32_up_to_rounding() -> None:
    """Scaled, unscaled and masked: frozen entries stay as they are, trained ones move as they do
    without a scale."""

    def weights_after(precision: Precision) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        mask = torch.arange(32).reshape(4, 8) % 3 == 0
        optimizer = SparseSGDM(model.named_parameters(), 0.1, momentum=0.9, masks={"weight": mask})
        inputs, labels = torch.randn(16, 8), torch.arange(16) % 4
        before = model.weight.detach().clone()
        for _ in range(3):
            train_step(model, optimizer, inputs, labels, StepSettings(precision, clip_norm=1.0))
        assert torch.equal(model.weight[~mask], before[~mask])
        assert not torch.equal(model.weight[mask], before[mask])
        return model.weight.detach()

    plain, half = weights_after(Precision("fp32", "cpu")), weights_after(float16().for_clients())
    torch.testing.assert_close(half, plain, atol=2e-3, rtol=0)
