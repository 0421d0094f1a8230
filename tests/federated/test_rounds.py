import logging
import math
from collections.abc import Callable

import pytest
import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated.aggregation import TABLE
from fedlens.federated.client import Task, Update
from fedlens.federated.rounds import Gathering
from fedlens.training.step import Tally
from tests.federated.worlds import rules

Parameters = dict[str, torch.Tensor]
START: Parameters = {"w": torch.ones(2, 3), "b": torch.zeros(4)}


def update(client: int, moved: Parameters | None = None, fault: str | None = None) -> Update:
    if moved is None:
        moved = {name: value + 0.1 * (client + 1) for name, value in START.items()}
    shard = torch.arange(10 * (client + 1))
    return Update(Task(3, client, shard, 5, 0.1), moved, Tally(client + 1.0, client, 20), fault)


def gathering(
    *, strict: bool = False, aggregator: str = "mean", momentum: float = 0.0
) -> Gathering:
    return Gathering(START, rules(momentum=momentum), aggregator=aggregator, strict=strict)


def with_value(bad: float) -> Callable[[Parameters], None]:
    def spoil(moved: Parameters) -> None:
        moved["w"][1, 2] = bad

    return spoil


SPOILED: dict[str, tuple[Callable[[Parameters], object], str]] = {
    "nan": (with_value(math.nan), "not finite"),
    "inf": (with_value(math.inf), "not finite"),
    "minus inf": (with_value(-math.inf), "not finite"),
    "missing": (lambda moved: moved.pop("b"), "missing b"),
    "extra": (lambda moved: moved.update(z=torch.zeros(1)), "unexpected z"),
    "shape": (lambda moved: moved.update(w=torch.zeros(3, 2)), r"w has shape (3, 2)"),
    "broadcast": (lambda moved: moved.update(w=torch.zeros(3)), r"w has shape (3,)"),
    "scalar": (lambda moved: moved.update(b=torch.zeros(())), r"b has shape ()"),
}


def spoiled(how: str) -> Update:
    moved = {name: value + 0.5 for name, value in START.items()}
    SPOILED[how][0](moved)
    return update(1, moved)


@pytest.mark.parametrize("aggregator", TABLE)
@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_update_is_left_out_counted_and_logged(
    how: str, aggregator: str, caplog: pytest.LogCaptureFixture
) -> None:
    clean, found = gathering(aggregator=aggregator), gathering(aggregator=aggregator)
    for client in (0, 2):
        assert clean.add(update(client))
    assert found.add(update(0))
    with caplog.at_level(logging.WARNING):
        assert not found.add(spoiled(how))
    assert found.add(update(2))
    assert "client 1 in round 3 was rejected" in caplog.text
    assert SPOILED[how][1] in caplog.text
    metrics = found.metrics()
    rejected = metrics.pop("rejected")
    assert isinstance(rejected, dict)
    assert set(rejected) == {"1"}
    assert SPOILED[how][1] in rejected["1"]
    assert metrics == clean.metrics()
    one, two = found.change(), clean.change()
    assert one is not None
    assert two is not None
    assert params.digest(one) == params.digest(two)


def test_a_client_that_gave_up_is_left_out_whatever_it_sent() -> None:
    found = gathering()
    assert not found.add(update(1, fault="The loss became nan"))
    assert found.metrics() == {"clients": [], "rejected": {"1": "The loss became nan"}}


@pytest.mark.parametrize("how", SPOILED)
def test_strictly_a_bad_update_ends_the_run_and_names_its_switch(how: str) -> None:
    with pytest.raises(FedlensError, match=r"client 1 in round 3.*federated\.fail_on_bad_update"):
        gathering(strict=True).add(spoiled(how))
    with pytest.raises(FedlensError, match=r"gave up \(federated\.fail_on_bad_update"):
        gathering(strict=True).add(update(1, fault="gave up."))


@pytest.mark.parametrize("aggregator", TABLE)
def test_a_round_without_a_valid_update_changes_nothing(aggregator: str) -> None:
    found = gathering(aggregator=aggregator)
    assert found.change() is None
    assert found.metrics() == {"clients": []}
    found.add(spoiled("nan"))
    assert found.change() is None
    assert set(found.metrics()) == {"clients", "rejected"}


def test_metrics_are_those_of_the_clients_taken() -> None:
    found = gathering()
    for client in (0, 2):
        found.add(update(client))
    metrics = found.metrics()
    assert metrics["clients"] == [0, 2]
    assert metrics["train"] == {"loss": 4 / 40, "accuracy": 2 / 40}
    assert metrics["client_losses"] == [1 / 20, 3 / 20]
    assert metrics["update_norms"] == pytest.approx([0.1 * 10**0.5, 0.3 * 10**0.5])
    assert "rejected" not in metrics


def test_rows_weigh_by_examples_and_by_effective_steps() -> None:
    """10 and 30 examples: (10·0.1 + 30·0.3)/40."""
    for aggregator in ("mean", "normalised_mean"):  # all did five steps
        found = gathering(aggregator=aggregator, momentum=0.9)
        for client in (0, 2):
            found.add(update(client))
        change = found.change()
        assert change is not None
        torch.testing.assert_close(change["b"], torch.full((4,), 0.25, dtype=torch.float64))
