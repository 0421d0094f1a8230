"""MPS without a Mac: fake tensors of that device refuse what the device refuses.

A fake tensor has a shape, a type and a device, but no values. Operations on two devices fail, and
`NoFloat64` fails on float64 anywhere but on the CPU, as MPS does.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedlens as fl
from fedlens import params
from fedlens.arithmetic.task_vectors import applied, composed
from fedlens.errors import FedlensError
from fedlens.federated.server.aggregation import RunningSum
from fedlens.federated.server.optimizers import make_server_optimizer, server_step
from fedlens.runtime.device import choose_device
from fedlens.sparse.sensitivity.fisher import LABELS


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type == "mps":
                assert value.dtype != torch.float64, f"{func} makes float64 on MPS"
        return result


@pytest.fixture
def mps() -> Iterator[torch.device]:
    with FakeTensorMode(), NoFloat64():
        yield torch.device("mps")


def named(device: torch.device) -> dict[str, torch.Tensor]:
    return {"weight": torch.empty(3, 2, device=device), "bias": torch.empty(3, device=device)}


def devices(values: params.Params) -> set[tuple[str, torch.dtype]]:
    return {(value.device.type, value.dtype) for value in values.values()}


def test_the_simulation_refuses_what_mps_refuses(mps: torch.device) -> None:
    value = torch.empty(2, device=mps)
    with pytest.raises(AssertionError, match="float64 on MPS"):
        value.double()
    with pytest.raises(AssertionError, match="float64 on MPS"):
        torch.zeros_like(value, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same device"):
        _ = value + torch.empty(2)


def test_float64_is_on_the_cpu(mps: torch.device) -> None:
    assert devices({"x": params.double(torch.empty(2, device=mps))}) == {("cpu", torch.float64)}
    assert devices(params.with_float64(named(mps))) == {("cpu", torch.float32)}
    on_cpu = named(torch.device("cpu"))
    assert all(value is on_cpu[name] for name, value in params.with_float64(on_cpu).items())


def test_a_server_of_a_model_on_mps_sums_on_the_cpu(mps: torch.device) -> None:
    model = named(mps)
    start = params.with_float64(params.copy(model))
    running = RunningSum(start)
    for _ in range(2):  # as a round takes clients' updates
        running.add(params.with_float64(named(mps)), 3.0)
    change = running.change(1 / 6)
    assert devices(change) == {("cpu", torch.float64)}
    for choice in ("sgd", "adam"):
        server, lr = make_server_optimizer(choice)
        moments = server.init(start)
        trained, _ = server_step(start, moments, change, server, lr)
        assert devices(trained) == {("cpu", torch.float32)}


def test_task_vectors_of_models_on_mps(mps: torch.device) -> None:
    base, tuned = named(mps), named(mps)
    vector = fl.task_vector(base, tuned)
    assert devices(vector) == {("cpu", torch.float64)}
    assert devices(applied(base, vector, 0.5)) == {("cpu", torch.float32)}
    assert devices(composed([(1.0, vector), (-0.5, vector)])) == {("cpu", torch.float64)}
    assert devices(fl.merge([base, tuned])) == {("cpu", torch.float64)}


def test_sensitivities_of_a_model_on_mps(mps: torch.device) -> None:
    """Labels are drawn in float64 on the CPU, and the sums of squares leave the device."""
    logits = torch.empty(4, 3, device=mps)
    p = logits.detach().cpu().double().softmax(1)
    ((classes, weights),) = LABELS["sampled"](p, torch.empty(4), torch.empty(4).double())
    assert classes.device.type == weights.device.type == "cpu"


def test_mps_is_chosen_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert choose_device("mps") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    with pytest.raises(FedlensError, match="device=mps is not available here: use device=auto"):
        choose_device("mps")
