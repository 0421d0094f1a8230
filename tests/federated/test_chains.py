"""Clients that train one after another, against SGD written out by hand."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated import wire
from fedlens.federated.algorithms.choice import make_aggregator
from fedlens.federated.algorithms.fedcm import FedCM
from fedlens.federated.algorithms.scaffold import SCAFFOLD
from fedlens.federated.client import (
    LocalTraining,
    Trainer,
    client_stream,
    in_training_layout,
    local_order,
)
from fedlens.federated.diagnostics import make_diagnostics
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.library import fedavg
from fedlens.federated.rounds import FederatedAlgorithm, RoundReport, ServerState
from fedlens.federated.sampling import chain, cyclic, draw_cohort
from fedlens.federated.server.carried import rules
from fedlens.federated.tasks import ClientTask, ClientUpdate, Cohort, Engine, NoUpdates
from fedlens.params import Params
from fedlens.registry import diagnostic
from fedlens.rng import generator
from fedlens.runtime.threads import limited_threads
from fedlens.training.optimizers import AdamW, Sgd
from tests.federated.small import CLASSES, WIDTH, examples, linear, local_training, network, shards

SEED, LR = 7, 0.1
SIZES = [6, 10, 4, 8]  # batches of 4 and of 2, which divide exactly
MASKS = {
    "backbone.0.weight": torch.arange(48).view(8, 6) % 3 == 0,
    "head.weight": torch.ones(3, 8, dtype=torch.bool),
}
Parameters = dict[str, torch.Tensor]


def cohort(*chains: Sequence[int], steps: int = 5, round_: int = 1) -> Cohort:
    tasks = tuple(
        ClientTask(round_, client, steps, LR, SIZES[client], chain=number)
        for number, links in enumerate(chains)
        for client in links
    )
    return Cohort(round_, tuple(task.client for task in tasks), tasks, lr=LR)


def made(given: LocalTraining, masks: Parameters | None = None) -> Trainer:
    return Trainer(network(), examples(), shards(SIZES).shard, given, SEED, masks=masks)


def played(
    drawn: Cohort,
    given: LocalTraining,
    *,
    masks: Parameters | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> tuple[ServerState, RoundReport]:
    trainer = made(given, masks)
    fed = FederatedAlgorithm(
        engine or Serial(trainer, 1),
        given,
        seed=SEED,
        **{"diagnostics": make_diagnostics(diagnostic.names), **options},
    )
    start = params.copy(dict(in_training_layout(network()).named_parameters()))
    return fed.apply(fed.init(start, masks=masks), drawn)


def by_hand(
    tasks: Sequence[ClientTask],
    given: LocalTraining,
    masks: Parameters | None = None,
) -> list[Parameters]:
    """The parameters before the first client, and after each: plain SGD, batch after batch."""
    model, data, partition = in_training_layout(network()), examples(), shards(SIZES)
    named = dict(model.named_parameters())
    optimizer = given.optimizer.make(named.items(), masks, lr=LR)
    passed = [params.copy(named)]
    for task in tasks:
        if not given.carry_momentum:
            optimizer.state.clear()
        anchor = passed[0 if given.proximal_to == "round" else -1]
        shard = partition.shard(task.client)
        order = local_order(len(shard), given.batch_size, task.steps, client_stream(SEED, task))
        for index in torch.split(*order):
            optimizer.zero_grad()
            chosen = shard[index]
            F.cross_entropy(model(data.features[chosen]), data.labels[chosen]).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach() - anchor[name], alpha=given.proximal)
            optimizer.step()
        passed.append(params.copy(named))
    return passed


def whole(state: ServerState) -> str:
    return params.digest(state.parameters)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with limited_threads(1):
        yield


GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum begins anew": {"momentum": 0.9},
    "momentum carried along": {"momentum": 0.9, "carry_momentum": True},
    "Nesterov, carried along": {"momentum": 0.9, "nesterov": True, "carry_momentum": True},
    "pulled to their own start": {"momentum": 0.5, "proximal": 0.3},
    "pulled to the round's start": {"momentum": 0.5, "proximal": 0.3, "proximal_to": "round"},
    "all": {"momentum": 0.5, "proximal": 0.3, "proximal_to": "round", "carry_momentum": True},
}


@pytest.mark.parametrize("masks", [None, MASKS], ids=["dense", "masked"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_chain_is_sgd_from_client_to_client_bit_for_bit(
    name: str, masks: Parameters | None
) -> None:
    given = local_training(**GIVEN[name])
    drawn = cohort([2, 0, 3, 1])
    state, report = played(drawn, given, masks=masks)
    assert whole(state) == params.digest(by_hand(drawn.tasks, given, masks)[-1])
    assert report.accepted == (2, 0, 3, 1)
    record = report.record()
    assert record["participants"] == record["clients"] == [2, 0, 3, 1]


Controls = dict[int, Parameters]


def with_controls(
    tasks: Sequence[ClientTask], start: Parameters, control: Parameters, own: Controls
) -> tuple[Parameters, Parameters, Controls]:
    """The same by hand with SCAFFOLD's terms: w ← w − η(g − c_i + c); c changes after the round."""
    model, data, partition = in_training_layout(network()), examples(), shards(SIZES)
    named, given = dict(model.named_parameters()), local_training()
    params.assign(named, start)
    zeros = params.zeros_like(start)
    own, mean = dict(own), params.copy(control)
    for task in tasks:
        before, gradients = own.get(task.client, zeros), params.zeros_like(start)
        shard = partition.shard(task.client)
        order = local_order(len(shard), given.batch_size, task.steps, client_stream(SEED, task))
        for index in torch.split(*order):
            chosen = shard[index]
            loss = F.cross_entropy(model(data.features[chosen]), data.labels[chosen])
            for name, gradient in zip(
                named, torch.autograd.grad(loss, list(named.values())), strict=True
            ):
                gradients[name] += gradient / task.steps
                named[name].data -= LR * (gradient - before[name] + control[name])
        own[task.client] = gradients  # c_i is the mean gradient of the client's last visit
        for name, value in gradients.items():
            mean[name] += (value - before[name]) / len(SIZES)
    return params.copy(named), mean, own


def agree(first: Params, second: Params) -> None:
    for name, value in second.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6)


def test_control_variates_correct_the_clients_of_a_chain() -> None:
    given = local_training()
    fed = FederatedAlgorithm(
        Serial(made(given), 1), given, seed=SEED, correction=SCAFFOLD(), population=len(SIZES)
    )
    w = params.copy(dict(in_training_layout(network()).named_parameters()))
    state, c, own = fed.init(w), params.zeros_like(w), {}
    for round_, links in enumerate([[2, 0], [3, 2], [1, 2, 0, 3]], start=1):
        drawn = cohort(links, round_=round_)
        w, c, own = with_controls(drawn.tasks, w, c, own)
        state, report = fed.apply(state, drawn)
        agree(state.parameters, w)
        agree(state.correction["control"], c)
        assert state.clients is not None
        for client, expected in own.items():
            agree(state.clients.get(client) or {}, expected)
        model = wire.size(state.trained)
        assert (report.bytes_down, report.bytes_up) == (2 * len(links) * model,) * 2


def test_measured_controls_are_the_gradients_before_the_first_round() -> None:
    given = local_training()
    fed = FederatedAlgorithm(
        Serial(made(given), 1), given, seed=SEED, correction=SCAFFOLD(), population=len(SIZES)
    )
    start = params.copy(dict(in_training_layout(network()).named_parameters()))
    tasks = [ClientTask(0, client, 1, LR, size) for client, size in enumerate(SIZES)]
    state, cost = fed.measure(fed.init(start), tasks)
    zeros, own = params.zeros_like(start), {}
    for task in tasks:
        _, _, one = with_controls([task], start, zeros, {})
        own |= one
        assert state.clients is not None
        agree(state.clients.get(task.client) or {}, one[task.client])
    assert params.digest(state.parameters) == params.digest(start)
    mean = {name: sum(one[name] for one in own.values()) / len(SIZES) for name in start}
    agree(state.correction["control"], mean)
    again, _ = fed.measure(state, tasks)
    assert params.digest(again.correction["control"]) == params.digest(state.correction["control"])
    model = wire.size(state.trained)
    assert cost == {"images": 4 * given.batch_size, "bytes_down": 4 * model, "bytes_up": 4 * model}
    following, _ = fed.apply(state, cohort([2, 0]))
    w, _, _ = with_controls(cohort([2, 0]).tasks, start, dict(state.correction["control"]), own)
    agree(following.parameters, w)


def test_what_clients_do_not_remember_is_not_measured() -> None:
    given = local_training()
    fed = FederatedAlgorithm(Serial(made(given), 1), given, seed=SEED)
    with pytest.raises(FedlensError, match="use SCAFFOLD"):
        fed.measure(fed.init(dict(network().named_parameters())), [])


def test_what_is_carried_or_held_to_makes_a_difference() -> None:
    ends = {whole(played(cohort([2, 0, 3]), local_training(**one))[0]) for one in GIVEN.values()}
    assert len(ends) == len(GIVEN)
    first = {name: whole(played(cohort([2]), local_training(**one))[0])
             for name, one in GIVEN.items()}  # fmt: skip
    assert first["momentum begins anew"] == first["momentum carried along"]
    assert first["pulled to their own start"] == first["pulled to the round's start"]


@pytest.mark.parametrize("name", GIVEN)
def test_two_chains_are_averaged_by_the_examples_of_their_clients(name: str) -> None:
    """6 + 4 examples against 10 + 8."""
    given, drawn = local_training(**GIVEN[name]), cohort([2, 0], [3, 1])
    state, _ = played(drawn, given)
    one, two = (by_hand(links, given)[-1] for links in drawn.chains)
    for name, value in state.trained.items():
        mean = (10 * one[name].double() + 18 * two[name].double()) / 28
        torch.testing.assert_close(value, mean.float(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregator", ["mean", "fednova", "median", "ties", "clipped_mean"])
def test_chains_of_one_client_are_averaging_bit_for_bit(aggregator: str) -> None:
    def sampled(how: Any) -> Cohort:
        return draw_cohort(
            SEED, 1, SIZES, size=2, lr=LR, local_steps=4, min_local_steps=1, sample=how
        )

    single = sampled(lambda *drawn: chain(*drawn, chains=2))
    assert len(single.chains) == 2
    assert sorted(single.drawn) == cyclic(SEED, 1, 4, 2)
    together = sampled(lambda *drawn: chain(*drawn)[0])
    assert together.chains == []
    assert together.drawn == single.drawn
    options = {"aggregator": make_aggregator(aggregator)}
    given = local_training(momentum=0.9)
    (one, chained), (two, plain) = (played(c, given, **options) for c in (single, together))
    assert whole(one) == whole(two)
    for key, value in plain.record().items():
        assert chained.record()[key] == pytest.approx(value, rel=1e-5)


class Spoiled:
    """An engine in which some clients fail: they send nan, give up, or do not answer."""

    def __init__(self, engine: Engine, how: dict[int, str]) -> None:
        self.engine = engine
        self.how = how

    def updates(self, parameters: Params, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        for update in self.engine.updates(parameters, tasks):
            how = self.how.get(update.task.client)
            if how == "silent":
                raise NoUpdates(tasks, "it did not answer")
            if how == "gave up":
                update = replace(update, fault="it gave up")
            if how in update.parameters:
                bad = torch.full_like(update.parameters[how], torch.nan)
                update = replace(update, parameters={**update.parameters, how: bad})
            yield update

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["head.bias", "momentum/head.bias", "gave up", "silent"])
def test_a_rejected_client_is_passed_over(how: str) -> None:
    given = local_training(momentum=0.9, carry_momentum=True)
    spoiled = Spoiled(Serial(made(given), 1), {0: how, 1: how})
    state, report = played(cohort([0, 2, 1, 3]), given, engine=spoiled)
    clean, expected = played(cohort([2, 3]), given)
    assert whole(state) == whole(clean)
    assert set(report.rejected) == {0, 1}
    assert report.accepted == (2, 3)
    assert report.diagnostics == expected.diagnostics


def test_a_chain_of_which_nobody_is_accepted_has_no_weight() -> None:
    given = local_training()
    spoiled = Spoiled(Serial(made(given), 1), {0: "gave up", 2: "silent"})
    state, _ = played(cohort([0, 2], [3, 1]), given, engine=spoiled)
    assert whole(state) == whole(played(cohort([3, 1]), given)[0])
    lost = Spoiled(Serial(made(given), 1), dict.fromkeys(range(4), "gave up"))
    state, report = played(cohort([0, 2], [3, 1]), given, engine=lost)
    assert whole(state) == params.digest(by_hand([], given)[0])
    assert report.accepted == ()


def test_a_round_in_which_nobody_answers_ends_the_run() -> None:
    given = local_training()
    silent = Spoiled(Serial(made(given), 1), dict.fromkeys(range(4), "silent"))
    with pytest.raises(NoUpdates, match=r"None of the 4 clients of round 1 .*it did not answer"):
        played(cohort([0, 2], [3, 1]), given, engine=silent)


def test_a_client_that_drops_out_is_not_waited_for() -> None:
    drawn = cohort([0, 2, 1, 3])
    without = replace(drawn, tasks=tuple(t for t in drawn.tasks if t.client != 2), dropout=True)
    state, report = played(without, local_training())
    assert whole(state) == whole(played(cohort([0, 1, 3]), local_training())[0])
    assert report.record()["dropped"] == [2]


@pytest.mark.parametrize(
    ("given", "down", "up"),
    [
        ({}, 1, 1),
        ({"momentum": 0.9}, 1, 1),
        ({"momentum": 0.9, "carry_momentum": True}, 2, 2),
        ({"proximal": 0.1}, 1, 1),
        ({"proximal": 0.1, "proximal_to": "round"}, 2, 1),
    ],
)
def test_every_client_receives_and_sends_once(given: dict[str, Any], down: int, up: int) -> None:
    state, report = played(cohort([0, 2], [3, 1]), local_training(**given), masks=MASKS)
    size = wire.size(state.trained, MASKS)
    assert (report.bytes_down, report.bytes_up) == (4 * down * size, 4 * up * size)


def test_diagnostics_are_of_each_clients_own_change() -> None:
    given, drawn = local_training(momentum=0.5), cohort([2, 0, 3], [1])
    _, report = played(drawn, given)
    deltas, weights = [], []
    for links in drawn.chains:
        passed = by_hand(links, given)
        for task, before, after in zip(links, passed, passed[1:], strict=False):
            moved = [(after[name] - before[name]).flatten() for name in before]
            deltas.append(torch.cat(moved).double())
            weights.append(task.examples / 28)
    norms = [delta.norm().item() for delta in deltas]
    assert report.diagnostics["update_norms"] == pytest.approx(norms, rel=1e-5)
    mean = sum(share * delta for share, delta in zip(weights, deltas, strict=True))
    assert isinstance(mean, torch.Tensor)
    squares = [p * (d - mean).square().sum() for p, d in zip(weights, deltas, strict=True)]
    assert report.diagnostics["drift"] == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-5)
    cosines = [float(F.cosine_similarity(a, b, dim=0)) for a in deltas for b in deltas
               if a is not b]  # fmt: skip
    assert report.diagnostics["cosine"] == pytest.approx(sum(cosines) / 12, rel=1e-5)


def test_a_caller_hears_of_each_clients_own_change() -> None:
    """Within a chain they add up to its change; chains are weighted by their examples."""
    given, drawn = local_training(), cohort([2, 0], [3, 1])
    trainer = made(given)
    fed = FederatedAlgorithm(Serial(trainer, 1), given, seed=SEED)
    state = fed.init(params.copy(trainer.trained))
    total = params.zeros_like(state.trained, torch.float64)
    weights = {0: 10 / 28, 1: 18 / 28}

    def on_update(update: ClientUpdate, accepted: bool) -> None:
        assert accepted
        assert update.task.chain is not None
        for name, value in total.items():
            change = update.parameters[name].double() - state.trained[name].double()
            value.add_(change, alpha=weights[update.task.chain])

    following, _ = fed.apply(state, drawn, on_update=on_update)
    for name, value in total.items():
        change = following.trained[name].double() - state.trained[name].double()
        torch.testing.assert_close(value, change, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("carry", [False, True])
def test_effective_steps_of_a_chain_add_up(carry: bool) -> None:
    """FedNova: a chain is one client that does all steps, without momentum between its clients."""
    given = local_training(momentum=0.5, carry_momentum=carry)
    short, long = cohort([2, 0], steps=2).tasks, cohort([3, 1], steps=3).tasks
    tasks = (*short, *(replace(task, chain=1) for task in long))
    drawn = Cohort(1, (2, 0, 3, 1), tasks, lr=LR)
    state, _ = played(drawn, given, aggregator=make_aggregator("fednova"))
    sgd = Sgd(momentum=0.5)
    counts = [sgd.effective_steps(4), sgd.effective_steps(6)] if carry else [
        2 * sgd.effective_steps(2), 2 * sgd.effective_steps(3)]  # fmt: skip
    shares = [10 / 28, 18 / 28]
    mean = sum(p * a for p, a in zip(shares, counts, strict=True))
    (start, *_, one), (*_, two) = (by_hand(links, given) for links in drawn.chains)
    for name, value in state.trained.items():
        change = sum(p / a * (end[name].double() - start[name].double())
                     for p, a, end in zip(shares, counts, (one, two), strict=True))  # fmt: skip
        torch.testing.assert_close(value.double(), start[name] + mean * change,
                                   rtol=1e-5, atol=1e-7)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
@pytest.mark.parametrize("masks", [None, MASKS], ids=["dense", "masked"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_workers_give_the_bits_of_one_process(name: str, masks: Parameters | None) -> None:
    given, drawn = local_training(**GIVEN[name]), cohort([2, 0], [3, 1])
    expected, alone = played(drawn, given, masks=masks)
    engine = Parallel(made(given, masks), workers=2, threads=1)
    try:
        for _ in range(2):
            state, report = played(drawn, given, masks=masks, engine=engine)
            assert whole(state) == whole(expected)
            assert report.record() == alone.record()
    finally:
        engine.close()


@pytest.mark.parametrize("name", GIVEN)
def test_heads_that_train_side_by_side_give_the_same_chains(name: str) -> None:
    given, drawn = local_training(**GIVEN[name]), cohort([2, 0], [3, 1])
    trainer = Trainer(linear(), examples(), shards(SIZES).shard, given, SEED)
    weight, bias = trainer.trained
    batched = Vectorised(
        examples(), shards(SIZES).shard, given, SEED, threads=1, names=(weight, bias)
    )
    states = []
    for engine in (Serial(trainer, 1), batched):
        fed = FederatedAlgorithm(engine, given, seed=SEED)
        start = params.copy(dict(linear().named_parameters()))
        states.append(fed.apply(fed.init(start), drawn)[0])
    for key, value in states[0].trained.items():
        torch.testing.assert_close(states[1].trained[key], value, rtol=1e-5, atol=1e-6)


def test_batch_norm_passes_its_statistics_along() -> None:
    """The running mean after two clients of m batches each is that of one client after them."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, CLASSES))
    given, drawn = local_training(), cohort([2, 0, 3])
    trainer = Trainer(model, examples(), shards(SIZES).shard, given, SEED, mode="averaged")
    carried = params.copy(trainer.carried)
    fed = FederatedAlgorithm(
        Serial(trainer, 1), given, seed=SEED, carried=rules(trainer.model, "averaged")
    )
    state = fed.init(params.copy(trainer.trained), carried=carried)
    state, _ = fed.apply(state, drawn)
    mean, data = carried["0.running_mean"].clone(), examples()
    for task in drawn.tasks:
        shard = shards(SIZES).shard(task.client)
        order = local_order(len(shard), 4, task.steps, client_stream(SEED, task))
        for index in torch.split(*order):
            mean = 0.9 * mean + 0.1 * data.features[shard[index]].mean(0)
    torch.testing.assert_close(state.carried["0.running_mean"], mean)


def test_what_makes_no_sense_in_a_chain_is_refused() -> None:
    given, drawn = local_training(), cohort([2, 0])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"correction": FedCM(alpha=0.1)}, "FedCM"),
        ({"own": ("head.bias",)}, "FedBN"),
        ({"statistics": {"head.bias": torch.zeros(3)}}, "statistics"),
        ({"release": lambda change, accepted: change}, "differential privacy"),
    ]
    for options, what in refused:
        with pytest.raises(FedlensError, match=f"{what}.*each starts where the last stopped"):
            played(drawn, given, **options)
    together = replace(drawn, tasks=tuple(replace(task, chain=None) for task in drawn.tasks))
    for name in ("momentum carried along", "pulled to the round's start"):
        with pytest.raises(FedlensError, match="are for chains: sample the cohort with"):
            played(together, local_training(**GIVEN[name]))
    with pytest.raises(FedlensError, match="SGD and momentum > 0"):
        local_training(carry_momentum=True)
    with pytest.raises(FedlensError, match="SGD and momentum > 0"):
        replace(local_training(), optimizer=AdamW(), carry_momentum=True)
    with pytest.raises(FedlensError, match="set proximal"):
        local_training(proximal_to="round")


def test_the_library_samples_chains() -> None:
    inputs = torch.randn(28, 3, generator=generator(0, "inputs"))
    labels = torch.arange(28) % 2
    options: dict[str, Any] = {"lr": 0.1, "local_steps": 3, "batch_size": 4, "threads": 1}
    fed = fedavg(
        torch.nn.Linear(3, 2), (inputs, labels), shards(SIZES), momentum=0.9,
        carry_momentum=True, proximal=0.1, proximal_to="round", **options,
    )  # fmt: skip
    state, seen = fed.init(), []
    for _ in range(2):
        drawn = fed.sample(state, participation=0.5, sampling="chain")
        assert len(drawn.chains) == 1
        seen += drawn.drawn
        state, report = fed.apply(state, drawn)
        assert report.accepted == drawn.drawn
    assert sorted(seen) == [0, 1, 2, 3]
    pairs = fed.sample(state, participation=1.0, sampling={"name": "chain", "chains": 2})
    assert [len(links) for links in pairs.chains] == [2, 2]
    own = fed.sample(state, sampling=lambda seed, round_, clients, size: [[3, 1], [0]])
    assert own.drawn == (3, 1, 0)
    assert [[task.client for task in links] for links in own.chains] == [[3, 1], [0]]
    with pytest.raises(FedlensError, match="sampling has no name: write it as"):
        fed.sample(state, sampling={"chains": 2})
    with pytest.raises(FedlensError, match="chain is not read by 'chain'"):
        fed.sample(state, sampling={"name": "chain", "chain": 2})
    with pytest.raises(FedlensError, match="proximal_to='rounds' is unknown: did you mean 'round'"):
        fedavg(torch.nn.Linear(3, 2), (inputs, labels), shards(SIZES), **options,
               proximal_to="rounds")  # type: ignore[arg-type]  # fmt: skip


def test_a_client_may_be_visited_twice_in_opposite_orders() -> None:
    given, drawn = local_training(), cohort([2, 0, 3], [3, 0, 2])
    state, report = played(drawn, given)
    one, two = (by_hand(links, given)[-1] for links in drawn.chains)
    for name, value in state.trained.items():
        mean = (one[name].double() + two[name].double()) / 2
        torch.testing.assert_close(value, mean.float(), rtol=1e-6, atol=1e-8)
    assert report.accepted == (2, 0, 3, 3, 0, 2)
    lost = replace(drawn, tasks=tuple(t for t in drawn.tasks if t.client != 0))
    assert lost.dropped == [0, 0]
