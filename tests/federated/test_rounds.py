import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated import wire
from fedlens.federated.algorithms.choice import make_aggregator
from fedlens.federated.algorithms.fedcm import FedCM
from fedlens.federated.algorithms.feddyn import FedDyn
from fedlens.federated.algorithms.ghbm import GHBM
from fedlens.federated.algorithms.scaffold import SCAFFOLD, InMemory
from fedlens.federated.client import Trainer
from fedlens.federated.diagnostics import make_diagnostics
from fedlens.federated.engines.serial import Serial
from fedlens.federated.rounds import BadUpdate, FederatedAlgorithm, RoundReport, ServerState
from fedlens.federated.sampling import draw_cohort
from fedlens.federated.server.optimizers import make_server_optimizer
from fedlens.federated.tasks import ClientTask, ClientUpdate, Cohort
from fedlens.params import Params
from fedlens.registry import aggregator, diagnostic
from fedlens.training.optimizers import AdamW
from fedlens.training.step import Tally
from tests.federated.small import examples, local_training, network, shards

Parameters = dict[str, torch.Tensor]
START: Parameters = {"w": torch.ones(2, 3), "b": torch.zeros(4)}
NAMES = aggregator.names
ROUND = 3


class Scripted:
    """An engine whose clients answer as they are told."""

    def __init__(self, updates: Sequence[ClientUpdate]) -> None:
        self.script = {update.task.client: update for update in updates}

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        return (replace(self.script[task.client], task=task) for task in tasks)

    def close(self) -> None:
        pass


def update(client: int, moved: Parameters | None = None, fault: str | None = None) -> ClientUpdate:
    if moved is None:
        moved = {name: value + 0.1 * (client + 1) for name, value in START.items()}
    task = ClientTask(ROUND, client, 5, 0.1, 10 * (client + 1))
    return ClientUpdate(task, moved, Tally(client + 1.0, client, 20), fault)


def cohort(*updates: ClientUpdate) -> Cohort:
    tasks = tuple(one.task for one in updates)
    return Cohort(ROUND, tuple(task.client for task in tasks), tasks, lr=0.1)


def played(
    *updates: ClientUpdate, aggregator: str = "mean", momentum: float = 0.0, **options: Any
) -> tuple[ServerState, RoundReport]:
    algorithm = FederatedAlgorithm(
        Scripted(updates),
        local_training(momentum=momentum),
        make_aggregator(aggregator),
        diagnostics=make_diagnostics(diagnostic.names),
        **options,
    )
    state = replace(algorithm.init(START), round=ROUND - 1)
    return algorithm.apply(state, cohort(*updates))


def with_value(bad: float) -> Callable[[Parameters], None]:
    def spoil(moved: Parameters) -> None:
        moved["w"][1, 2] = bad

    return spoil


SPOILED: dict[str, tuple[Callable[[Parameters], object], str]] = {
    "nan": (with_value(math.nan), "not finite"),
    "inf": (with_value(math.inf), "not finite"),
    "minus inf": (with_value(-math.inf), "not finite"),
    "large": (with_value(1e4), "more than 1000 times that of the initial model"),
    "huge": (with_value(-3e38), "more than 1000 times that of the initial model"),
    "missing": (lambda moved: moved.pop("b"), "missing b"),
    "extra": (lambda moved: moved.update(z=torch.zeros(1)), "unexpected z"),
    "shape": (lambda moved: moved.update(w=torch.zeros(3, 2)), r"w has shape (3, 2)"),
    "broadcast": (lambda moved: moved.update(w=torch.zeros(3)), r"w has shape (3,)"),
    "scalar": (lambda moved: moved.update(b=torch.zeros(())), r"b has shape ()"),
}


def spoiled(how: str) -> ClientUpdate:
    moved = {name: value + 0.5 for name, value in START.items()}
    SPOILED[how][0](moved)
    return update(1, moved)


def measured(report: RoundReport) -> dict[str, Any]:
    """The record without what depends on who was asked."""
    record = report.record()
    for key in ("participants", "bytes_down", "bytes_up"):
        record.pop(key)
    return record


@pytest.mark.parametrize("aggregator", NAMES)
@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_update_is_left_out_counted_and_logged(
    how: str, aggregator: str, caplog: pytest.LogCaptureFixture
) -> None:
    clean, expected = played(update(0), update(2), aggregator=aggregator)
    with caplog.at_level(logging.WARNING):
        state, report = played(update(0), spoiled(how), update(2), aggregator=aggregator)
    assert "client 1 in round 3 was rejected" in caplog.text
    assert SPOILED[how][1] in caplog.text
    assert set(report.rejected) == {1}
    record = measured(report)
    assert SPOILED[how][1] in record.pop("rejected")["1"]
    assert record == measured(expected)
    assert params.digest(state.trained) == params.digest(clean.trained)


def test_a_client_that_gave_up_is_left_out_whatever_it_sent() -> None:
    _, report = played(update(1, fault="The loss became nan"))
    assert measured(report) == {
        "lr": 0.1,
        "clients": [],
        "rejected": {"1": "The loss became nan"},
    }


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_update_can_end_the_training(how: str) -> None:
    with pytest.raises(FedlensError, match=r"client 1 in round 3.*bad_update='skip'"):
        played(spoiled(how), bad_update="raise")
    with pytest.raises(BadUpdate, match="gave up: leave") as raised:
        played(update(1, fault="gave up."), bad_update="raise")
    assert raised.value.update.task.client == 1
    assert raised.value.fault == "gave up."


@pytest.mark.parametrize("aggregator", NAMES)
def test_clients_cannot_make_the_model_larger_round_by_round(aggregator: str) -> None:
    """Each sends ten times what it received, in every round."""

    class Growing:
        def updates(self, start: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
            grown = {name: 10 * value for name, value in start.items()}
            return (ClientUpdate(task, grown, Tally(1.0, 1, 1)) for task in tasks)

        def close(self) -> None:
            pass

    algorithm = FederatedAlgorithm(Growing(), local_training(), make_aggregator(aggregator))
    state = algorithm.init(START)
    for number in range(1, 60):
        tasks = tuple(ClientTask(number, client, 5, 0.1, 10) for client in range(2))
        state, report = algorithm.apply(state, Cohort(number, (0, 1), tasks, lr=0.1))
        assert report.accepted or number > 1
    assert params.norm(START) < params.norm(state.trained) <= 1000 * (math.sqrt(6) + 1)


def test_a_chain_passes_over_a_client_that_sends_too_large_values() -> None:
    """Two of its steps together are too large, so the second and third client are left out."""
    limit = 1000 * (math.sqrt(6) + 1)

    class Steps:
        def updates(self, start: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
            for task in tasks:
                moved = {name: value.clone() for name, value in start.items()}
                moved["b"][0] += 0.6 * limit
                yield ClientUpdate(task, moved, Tally(1.0, 1, 1))

        def close(self) -> None:
            pass

    algorithm = FederatedAlgorithm(Steps(), local_training())
    tasks = tuple(ClientTask(1, client, 5, 0.1, 10, chain=0) for client in range(3))
    state, report = algorithm.apply(algorithm.init(START), Cohort(1, (0, 1, 2), tasks, lr=0.1))
    assert report.accepted == (0,)
    assert set(report.rejected) == {1, 2}
    assert state.trained["b"][0] == pytest.approx(0.6 * limit)


def test_a_round_whose_model_has_a_fault_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    faults = iter(["it cannot be used", None])
    state, report = played(update(0), update(2), fault=lambda _: next(faults))
    assert params.digest(state.trained) == params.digest(START)
    assert state.round == ROUND
    assert report.rejected == {0: "it cannot be used", 2: "it cannot be used"}
    assert set(measured(report)) == {"lr", "clients", "rejected"}
    assert "it cannot be used" in caplog.text
    clean, _ = played(update(0), update(2))
    state, report = played(update(0), update(2), fault=lambda _: next(faults))
    assert params.digest(state.trained) == params.digest(clean.trained)
    assert report.accepted == (0, 2)


@pytest.mark.parametrize("aggregator", NAMES)
@pytest.mark.parametrize("updates", [(), (spoiled("nan"),)], ids=["none", "bad"])
def test_a_round_without_a_valid_update_changes_nothing(
    aggregator: str, updates: tuple[ClientUpdate, ...]
) -> None:
    state, report = played(*updates, aggregator=aggregator)
    assert params.digest(state.trained) == params.digest(START)
    assert state.round == ROUND
    keys = {"lr", "clients", "rejected"} if updates else {"lr", "clients"}
    assert set(measured(report)) == keys


def test_the_record_is_of_the_clients_accepted() -> None:
    _, report = played(update(0), update(2))
    record = report.record()
    assert list(record) == [
        "lr", "participants", "clients", "train", "client_losses", "update_norms", "drift",
        "cosine", "sign_agreement", "bytes_down", "bytes_up",
    ]  # fmt: skip
    assert record["clients"] == [0, 2]
    assert record["train"] == {"loss": 4 / 40, "accuracy": 2 / 40}
    assert record["client_losses"] == [1 / 20, 3 / 20]
    assert record["update_norms"] == pytest.approx([0.1 * 10**0.5, 0.3 * 10**0.5])
    assert record["bytes_up"] == record["bytes_down"] == 2 * wire.size(START)


def test_the_record_lists_dropouts_and_stragglers_where_there_may_be_some() -> None:
    algorithm = FederatedAlgorithm(Scripted([update(0), update(2)]), local_training())
    state = replace(algorithm.init(START), round=ROUND - 1)
    drawn = replace(cohort(update(0), update(2)), drawn=(0, 1, 2), dropout=True, stragglers=True)
    _, report = algorithm.apply(state, drawn)
    record = report.record()
    assert list(record)[:4] == ["lr", "participants", "dropped", "local_steps"]
    assert (record["dropped"], record["local_steps"]) == ([1], [5, 5])
    assert record["bytes_down"] == 3 * wire.size(START)
    assert record["bytes_up"] == 2 * wire.size(START)


def test_clients_that_keep_their_losses_leave_none_in_the_record() -> None:
    _, report = played(update(0), replace(update(2), tally=None))
    assert report.tally is None
    assert "train" not in report.record()
    assert "client_losses" not in report.record()
    assert "drift" in report.record()
    assert report.timings()["images_per_second"] == 0


def test_securely_aggregated_updates_have_no_diagnostics() -> None:
    hidden = [replace(update(0), parameters=update(client).parameters) for client in (1, 1)]
    updates = [replace(one, task=update(k).task, individual=False) for k, one in enumerate(hidden)]
    _, report = played(*updates)
    assert report.diagnostics == {}
    assert "train" in report.record()


def test_rows_weigh_by_examples_and_by_effective_steps() -> None:
    """10 and 30 examples: (10·0.1 + 30·0.3)/40; alike, (0.1 + 0.3)/2."""
    for name in ("mean", "fednova"):  # all did five steps
        state, _ = played(update(0), update(2), aggregator=name, momentum=0.9)
        torch.testing.assert_close(state.trained["b"], torch.full((4,), 0.25))
        state, _ = played(update(0), update(2), aggregator=name, weighting="uniform")
        torch.testing.assert_close(state.trained["b"], torch.full((4,), 0.2))


def test_the_server_steps_by_what_is_released() -> None:
    def halved(change: Parameters, accepted: int) -> Parameters:
        assert accepted == 2
        return {name: value / 2 for name, value in change.items()}

    state, _ = played(update(0), update(2), release=halved)
    torch.testing.assert_close(state.trained["b"], torch.full((4,), 0.125))


def test_a_caller_hears_of_every_update_while_it_is_lent() -> None:
    heard: list[tuple[int, bool]] = []
    algorithm = FederatedAlgorithm(Scripted([update(0), spoiled("nan")]), local_training())
    state = replace(algorithm.init(START), round=ROUND - 1)
    algorithm.apply(
        state,
        cohort(update(0), spoiled("nan")),
        on_update=lambda one, accepted: heard.append((one.task.client, accepted)),
    )
    assert heard == [(0, True), (1, False)]


def test_a_cohort_of_another_round_is_refused() -> None:
    algorithm = FederatedAlgorithm(Scripted([update(0)]), local_training())
    with pytest.raises(FedlensError, match="for round 3, but the state is after round 0"):
        algorithm.apply(algorithm.init(START), cohort(update(0)))


SIZES = [6, 10, 4, 20]
MASKS = {"backbone.0.weight": torch.arange(48).view(8, 6) % 3 == 0}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"correction": SCAFFOLD(), "population": 4},
    "ghbm": {"correction": GHBM(tau=2)},
    "fedcm": {"correction": FedCM()},
    "feddyn": {"correction": FedDyn(), "population": 4},
    "fedadam": {"server": make_server_optimizer("adam")[0], "server_lr": 0.01},
    "ties": {"aggregator": make_aggregator("ties")},
}


def algorithm(masks: dict[str, torch.Tensor], **options: Any) -> tuple[FederatedAlgorithm, Trainer]:
    given = local_training(momentum=0.5, proximal=0.1).corrected(options.get("correction"))
    trainer = Trainer(network(), examples(), shards(SIZES).shard, given, 7, masks=masks)
    return FederatedAlgorithm(Serial(trainer, 1), given, seed=7, **options), trainer


def contents(state: ServerState) -> str:
    """A digest of all that a state holds."""
    tensors = {f"trained/{name}": value for name, value in state.trained.items()}
    for kind, values in state.moments.items():
        tensors |= {f"{kind}/{name}": value for name, value in values.items()}
    for kind, values in state.correction.items():
        tensors |= {f"correction/{kind}/{name}": value for name, value in values.items()}
    memory = state.clients.states if isinstance(state.clients, InMemory) else {}
    for client, values in memory.items():
        tensors |= {f"{client}/{name}": value for name, value in values.items()}
    return params.digest(tensors)


@pytest.mark.parametrize("masks", [{}, MASKS], ids=["dense", "masked"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_a_function_of_state_and_cohort(
    name: str, masks: dict[str, torch.Tensor]
) -> None:
    fed, trainer = algorithm(masks, **ALGORITHMS[name])
    state = fed.init(trainer.trained, masks=masks)
    for round_ in range(1, 4):
        drawn = draw_cohort(7, round_, SIZES, size=2, lr=0.1, local_steps=3)
        before = contents(state)
        following, _ = fed.apply(state, drawn)
        again, _ = fed.apply(state, drawn)
        assert contents(state) == before
        assert contents(following) == contents(again) != before
        fresh, _ = algorithm(masks, **ALGORITHMS[name])  # nothing is hidden in the engine
        assert contents(fresh.apply(state, drawn)[0]) == contents(following)
        state = following


def test_whole_parameters_keep_frozen_entries() -> None:
    fed, trainer = algorithm(MASKS)
    before = params.copy(trainer.trained)
    state = fed.init(trainer.trained, masks=MASKS)
    state, _ = fed.apply(state, draw_cohort(7, 1, SIZES, size=4, lr=0.1, local_steps=5))
    name, mask = next(iter(MASKS.items()))
    whole = state.parameters
    assert state.trained[name].shape == (16,)
    assert torch.equal(whole[name][~mask], before[name][~mask])
    assert torch.equal(whole[name][mask], state.trained[name])
    assert not torch.equal(whole[name][mask], before[name][mask])
    assert set(whole) == set(before)


def test_scaffold_sends_its_controls_too() -> None:
    fed, trainer = algorithm({}, correction=SCAFFOLD(), population=4)
    state = fed.init(trainer.trained)
    state, report = fed.apply(state, draw_cohort(7, 1, SIZES, size=2, lr=0.1, local_steps=3))
    assert report.bytes_up == 2 * 2 * wire.size(state.trained)
    assert isinstance(state.clients, InMemory)
    assert set(state.clients.states) == set(report.accepted)


def test_scaffold_refuses_an_optimizer_without_effective_steps() -> None:
    given = replace(local_training(), optimizer=AdamW())
    fed = FederatedAlgorithm(Scripted([]), given, correction=SCAFFOLD(), population=4)
    with pytest.raises(FedlensError, match=r"SCAFFOLD .* only SGD"):
        fed.init(START)
