from collections.abc import Callable

import pytest
import torch

from fedlens import params
from fedlens.federated.client import Trainer, trainable_parameters
from fedlens.federated.engines.serial import Serial
from fedlens.federated.host import CalibrationSettings, Calibrator, ClientHost, LocalClients
from fedlens.federated.tasks import Clients, Engine, Stage
from fedlens.models.heads import Statistics
from fedlens.sparse.masks import Masks
from tests.federated.small import CLASSES, WIDTH, examples, local_training, network, shards, tasks

SIZES = [4, 10, 6]
SEED = 3


def clients(**settings: int) -> LocalClients:
    model, known, shard = network(), examples(20), shards(SIZES).shard
    candidates = {n: p for n, p in trainable_parameters(model).items() if n == "backbone.0.weight"}
    calibration = CalibrationSettings("least_sensitive", 0.25, rounds=2, **settings)

    def make_engine(stage: Stage, masks: Masks) -> Engine:
        assert (stage, masks) == ("rounds", {})
        return Serial(Trainer(model, known, shard, local_training(), SEED), 1)

    host = ClientHost(
        examples=known,
        shard=shard,
        classes=CLASSES,
        make_engine=make_engine,
        features=lambda: known,
        make_calibrator=lambda: Calibrator(model, candidates, calibration, SEED),
    )
    return LocalClients(host, SIZES)


def test_local_clients_are_clients() -> None:
    found: Clients = clients()
    found.share(head=None, masks=None)
    assert found.sizes == SIZES


def test_a_host_trains_as_its_engine_does() -> None:
    local = clients()
    start = params.copy(trainable_parameters(network()))
    for task in tasks(SIZES):
        expected = params.digest(local.host.train(task, start).parameters)
        (update,) = local.engine("rounds").updates(start, [task])
        assert params.digest(update.parameters) == expected


def test_statistics_of_all_clients_add_up_to_those_of_the_data() -> None:
    known = examples(20)
    total = clients().statistics(torch.zeros(0, WIDTH), CLASSES)
    expected = Statistics.of(known.features, known.labels, CLASSES)
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(total, name), value)


def test_a_sensitivity_is_of_the_parameters_given_and_leaves_the_model_alone() -> None:
    local = clients()
    own = local.host.calibrator.candidates
    before = params.digest(own)
    (here,) = local.sensitivities([1], 0, own)
    (copied,) = local.sensitivities([1], 0, params.copy(own))
    assert params.digest(copied.sums) == params.digest(here.sums)
    assert here.count == SIZES[1]
    (other,) = local.sensitivities([1], 0, {name: value * 2 for name, value in own.items()})
    assert params.digest(other.sums) != params.digest(here.sums)
    assert params.digest(own) == before


def test_a_client_s_examples_can_be_limited() -> None:
    local = clients(examples=5)
    own = local.host.calibrator.candidates
    assert [one.count for one in local.sensitivities([0, 1, 2], 0, own)] == [4, 5, 5]


@pytest.mark.parametrize("different", [lambda k: k, lambda k: k + 1])
def test_rankings_are_each_client_s_own(different: Callable[[int], int]) -> None:
    local = clients()
    rank = local.host.calibrator.rank
    like = rank(lambda round_: params.copy(local.host.calibrator.candidates))
    one, two = local.rankings([0, different(0)], like)
    same = all(torch.equal(order, two.orders[key]) for key, order in one.orders.items())
    assert same == (different(0) == 0)
