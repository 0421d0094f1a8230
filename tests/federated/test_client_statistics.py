"""What clients send beside their updates: computed where they end, the same bits on all engines."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens import params
from fedlens.arithmetic.merging import merge
from fedlens.errors import FedlensError
from fedlens.federated import wire
from fedlens.federated.client import Trainer, client_stream
from fedlens.federated.client_statistics import client_statistic
from fedlens.federated.engines import rows
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.sparse.sensitivity.fisher import sensitivity
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients
from tests.federated.small import examples, linear, local_training, network, shards, tasks

SIZES = [6, 10, 4, 20]
MASKS = {"backbone.0.weight": torch.arange(48).view(8, 6) % 3 == 0}
NEEDS = ["fisher", "input_moments"]
AGGREGATORS = {"regmean": "input_moments", "fisher_average": "fisher"}


def trainer(needs: str, count: int | None = None, **options: Any) -> Trainer:
    return Trainer(
        network(),
        examples(),
        shards(SIZES).shard,
        local_training(),
        7,
        statistic=client_statistic(needs, count),
        **options,
    )


def federation(aggregator: Any, **options: Any) -> fl.Federation:
    known = examples()
    data = known.features, known.labels
    return fl.fedavg(
        network(), data, shards(SIZES), lr=0.1, local_steps=3, batch_size=4,
        aggregator=aggregator, seed=7, **options,
    )  # fmt: skip


@pytest.mark.parametrize("masks", [{}, MASKS], ids=["dense", "masked"])
@pytest.mark.parametrize("needs", NEEDS)
def test_worker_processes_give_the_bits_of_one_process(
    needs: str, masks: Mapping[str, torch.Tensor]
) -> None:
    asked = tasks(SIZES)
    one, many = (trainer(needs, 5, masks=masks) for _ in "12")
    start = params.copy(one.packed())
    parallel = Parallel(many, workers=2, threads=1)

    def answers(engine: Serial | Parallel) -> list[tuple[int, str, str]]:
        return [
            (u.task.client, params.digest(u.parameters), params.digest(u.statistics))
            for u in engine.updates(start, asked)
        ]

    try:
        expected = answers(Serial(one, 1))
        assert answers(parallel) == expected
        assert len({digest for _, _, digest in expected}) == len(SIZES)
    finally:
        parallel.close()


def test_input_moments_are_those_where_the_client_ends() -> None:
    made = trainer("input_moments")
    (task,) = tasks(SIZES)[1:2]
    update = made.train(task, params.copy(made.packed()))
    model = deepcopy(made.model)
    params.assign(dict(model.named_parameters()), update.parameters)
    known = examples()
    expected = fl.input_moments(model, known.features[shards(SIZES).shard(1)])
    assert params.mismatch(made.statistics_layout(), update.statistics) is None
    for name, value in expected.items():
        torch.testing.assert_close(update.statistics[name], value.float())


def test_the_fisher_information_has_a_draw_of_its_own_and_is_packed_as_the_update() -> None:
    made = trainer("fisher", masks=MASKS)
    (task,) = tasks(SIZES)[1:2]
    update = made.train(task, params.copy(made.packed()))
    known, shard = examples(), shards(SIZES).shard(1)
    squares = SquaredGradients(made.model, list(made.trained), known.features[:2])
    scores = sensitivity(
        squares, known, index=shard, target="log_prob", stream=client_stream(7, task)
    ).mean()
    assert params.mismatch(update.parameters, update.statistics) is None
    masked = scores["backbone.0.weight"].float()[MASKS["backbone.0.weight"]]
    assert torch.equal(update.statistics["backbone.0.weight"], masked)
    assert torch.equal(update.statistics["head.bias"], scores["head.bias"].float())
    assert float(masked.sum()) > 0


@pytest.mark.parametrize("needs", NEEDS)
def test_at_most_so_many_examples_are_read(needs: str) -> None:
    seen: list[int] = []

    class Counting:
        labels = examples().labels

        def __len__(self) -> int:
            return len(self.labels)

        def to(self, device: torch.device) -> "Counting":
            return self

        def batch(self, index: torch.Tensor, draw: Any = None) -> torch.Tensor:
            seen.append(len(index))
            return examples().batch(index)

    made = trainer(needs, 5)
    packing, shard = made.packing, shards(SIZES).shard(3)
    task = tasks(SIZES)[3]
    statistic = client_statistic(needs, 5)
    assert statistic is not None
    statistic.compute(made.model, packing, Counting(), shard, client_stream(7, task))
    assert seen[-1] == 5
    assert sum(seen) <= 7  # and two to plan the gradients on


def test_the_statistics_leave_the_model_and_its_mode_as_they_are() -> None:
    for needs in NEEDS:
        made = trainer(needs)
        made.model.train()
        update = made.train(tasks(SIZES)[0], params.copy(made.packed()))
        assert made.model.training
        plain = Trainer(network(), examples(), shards(SIZES).shard, local_training(), 7)
        expected = plain.train(tasks(SIZES)[0], params.copy(plain.packed()))
        assert params.digest(update.parameters) == params.digest(expected.parameters)


def test_heads_on_features_train_one_by_one_where_statistics_are_sent() -> None:
    for needs, kind in ((None, Vectorised), ("fisher", Serial)):
        made = Trainer(
            linear(), examples(), shards(SIZES).shard, local_training(), 7,
            statistic=client_statistic(needs),
        )  # fmt: skip
        assert type(rows.serial(made, 4)) is kind


def test_an_unknown_statistic_is_refused() -> None:
    with pytest.raises(FedlensError, match="no client statistic 'fischer': did you mean 'fisher'"):
        client_statistic("fischer")


# --- as aggregators ------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_round_merges_updates_by_the_clients_statistics(aggregator: str) -> None:
    fed = federation(aggregator)
    state, kept = fed.init(), {}

    def keep(update: ClientUpdate, accepted: bool) -> None:
        assert accepted
        kept[update.task.client] = (
            fl.task_vector(state.trained, params.copy(update.parameters)),
            params.copy(update.statistics),
            update.task.examples,
        )

    following, report = fed.apply(state, fed.sample(state, participation=1.0), on_update=keep)
    expected = merge(
        [kept[k][0] for k in range(4)],
        aggregator,
        weights=[kept[k][2] for k in range(4)],
        statistics=[kept[k][1] for k in range(4)],
    )
    for name, value in expected.items():
        torch.testing.assert_close(following.trained[name], (state.trained[name] + value).float())
    size = wire.size(state.trained)
    beside = wire.size(fed.algorithm.statistics)
    assert beside > 4 * (36 + 64 if aggregator == "regmean" else 8 * 6 + 8 + 24 + 3)
    assert (report.bytes_down, report.bytes_up) == (4 * size, 4 * (size + beside))
    plain, _ = federation("mean").apply(state, fed.sample(state, participation=1.0))
    assert params.digest(plain.trained) != params.digest(following.trained)


@pytest.mark.parametrize("aggregator", ["regmean", "fisher_average", "tsv_merge", "iso_c"])
@pytest.mark.parametrize("masks", [None, MASKS], ids=["dense", "masked"])
def test_engines_give_the_same_bits_and_frozen_entries_stay(aggregator: str, masks: Any) -> None:
    ends = []
    for engine in ("serial", "parallel"):
        with federation(
            aggregator, masks=masks, engine=engine, workers=2 if engine == "parallel" else None,
            threads=1,
        ) as fed:  # fmt: skip
            state = fed.init()
            for _ in range(2):
                state, report = fed.apply(state, fed.sample(state, participation=0.75))
                assert len(report.accepted) == 3
            ends.append(state.parameters)
    assert params.digest(ends[0]) == params.digest(ends[1])
    if masks:
        name, mask = next(iter(MASKS.items()))
        before = fed.init().parameters[name]
        assert torch.equal(ends[0][name][~mask], before[~mask])
        assert not torch.equal(ends[0][name][mask], before[mask])


def test_masked_tensors_are_merged_whole_with_zeros_where_they_are_frozen() -> None:
    fed = federation("iso_c", masks=MASKS)
    state, vectors = fed.init(), {}

    def keep(update: ClientUpdate, accepted: bool) -> None:
        whole = torch.zeros(8, 6, dtype=torch.float64)
        name, mask = next(iter(MASKS.items()))
        sent = update.parameters[name].double() - state.trained[name].double()
        whole[mask] = sent
        vectors[update.task.client] = {name: whole}

    following, _ = fed.apply(state, fed.sample(state, participation=1.0), on_update=keep)
    merged = merge(
        [vectors[k] for k in range(4)], "iso_c", weights=[float(size) for size in SIZES]
    )["backbone.0.weight"]
    mask = MASKS["backbone.0.weight"]
    expected = state.trained["backbone.0.weight"].double() + merged[mask]
    torch.testing.assert_close(following.trained["backbone.0.weight"], expected.float())


class Spoiled:
    """Serial, but one client's statistics are changed on their way."""

    def __init__(self, inner: Any, spoil: Any) -> None:
        self.inner, self.spoil = inner, spoil

    def updates(self, parameters: Any, asked: list[ClientTask]) -> Iterator[ClientUpdate]:
        for update in self.inner.updates(parameters, asked):
            if update.task.client == 2:
                update = replace(update, statistics=self.spoil(dict(update.statistics)))
            yield update

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda sent: {}, "its statistics do not fit: missing backbone.0.weight, head.weight"),
        (lambda sent: sent | {"head.weight": torch.ones(2, 2)}, "head.weight has shape"),
        (lambda sent: sent | {"head.weight": torch.full((8, 8), torch.nan)}, "not finite"),
    ],
)
def test_a_client_with_bad_statistics_is_rejected_and_the_others_count(
    spoil: Any, why: str
) -> None:
    fed = federation("regmean")
    algorithm = replace(fed.algorithm, engine=Spoiled(fed.algorithm.engine, spoil))
    state = fed.init()
    _, report = algorithm.apply(state, fed.sample(state, participation=1.0))
    assert report.accepted == (0, 1, 3)
    assert why in report.rejected[2]


def test_a_class_of_ones_own_reads_the_statistics() -> None:
    @fl.aggregator(label="heaviest", needs="fisher")
    class MostInformed:
        def __init__(self, start: Any, stream: Any) -> None:
            self.start, self.best = start, (-1.0, {})

        def add(self, one: Any) -> None:
            information = sum(float(value.sum()) for value in one.statistics.values())
            if information > self.best[0]:
                self.best = information, fl.task_vector(self.start, one.parameters)

        def change(self) -> Any:
            return self.best[1]

    try:
        fed = federation("most_informed")
        _, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        assert len(report.accepted) == 4
    finally:
        del fl.aggregator.added["most_informed"]


def test_the_number_of_examples_must_be_positive() -> None:
    with pytest.raises(FedlensError, match="statistics_examples=0 must be 1 or more"):
        federation("regmean", statistics_examples=0)
