"""What travels beside the trained parameters: BatchNorm's statistics, and weights under LoRA."""

from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens import params
from fedlens.federated import wire
from fedlens.federated.client import Trainer
from fedlens.federated.engines.serial import Serial
from fedlens.federated.rounds import FederatedAlgorithm
from fedlens.federated.server import carried
from fedlens.federated.server.carried import ExactProducts
from fedlens.federated.tasks import Cohort
from fedlens.models import classifier
from fedlens.models.architectures import batch_norm
from fedlens.models.classifier import Classifier
from fedlens.models.trained_parts import lora
from fedlens.rng import Stream, generator, scoped
from tests.federated.small import CLASSES, WIDTH, examples, local_training, shards, tasks

SIZES = [8, 12, 20]


def norm_net() -> nn.Sequential:
    with scoped(generator(0, "norm net")):
        return nn.Sequential(
            nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
        )


def federation(mode: str, **options: Any) -> fl.Federation:
    data = examples()
    return fl.fedavg(
        norm_net(), (data.features, data.labels), shards(SIZES), lr=0.1, local_steps=3,
        batch_size=4, batch_norm=mode, **options,
    )  # fmt: skip


def after(fed: fl.Federation, rounds: int = 3, participation: float = 0.6) -> fl.ServerState:
    state = fed.init()
    with fed:
        for _ in range(rounds):
            state, _ = fed.apply(state, fed.sample(state, participation=participation))
    return state


def test_statistics_are_the_weighted_mean_of_the_clients_own() -> None:
    fed = federation("averaged")
    state = fed.init()
    seen: dict[int, dict[str, torch.Tensor]] = {}
    following, _ = fed.apply(
        state,
        fed.sample(state, participation=1.0),
        on_update=lambda update, _: seen.update(
            {update.task.client: params.copy(update.parameters)}
        ),
    )
    for name in ("1.running_mean", "1.running_var"):
        expected = sum(SIZES[k] * seen[k][name].double() for k in seen) / sum(SIZES)
        torch.testing.assert_close(following.parameters[name], expected.float())
        assert not torch.equal(following.parameters[name], state.carried[name])


def test_frozen_statistics_neither_change_nor_travel() -> None:
    fed = federation("frozen")
    state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
    assert not state.carried
    assert "1.running_mean" not in state.parameters
    moving = federation("averaged")
    _, larger = moving.apply(moving.init(), moving.sample(moving.init(), participation=1.0))
    sent = {**fed.init().trained, **moving.init().carried}
    assert report.bytes_up == 3 * wire.size(fed.init().trained)
    assert larger.bytes_up == larger.bytes_down == 3 * wire.size(sent)


def test_one_client_with_all_data_is_central_training_with_batch_norm() -> None:
    data = examples()
    fed = fl.fedavg(
        norm_net(), (data.features, data.labels), shards([40]), lr=0.1, local_steps=10,
        batch_size=40, batch_norm="averaged",
    )  # fmt: skip
    state, _ = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
    model = norm_net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.features), data.labels).backward()
        optimizer.step()
    expected = model.state_dict()
    for name, value in state.parameters.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["averaged", "local"])
def test_worker_processes_give_the_same_bits(mode: str) -> None:
    alone = after(federation(mode, threads=1))
    workers = after(federation(mode, engine="parallel", workers=2))
    assert params.digest(alone.parameters) == params.digest(workers.parameters)


def test_local_clients_begin_with_the_layers_they_ended_with() -> None:
    fed = federation("local")
    state, _ = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
    assert state.clients is not None
    own = state.clients.get(0)
    assert own is not None
    assert list(own) == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    tasks_seen = []
    inner = fed.algorithm.engine.updates

    def spy(parameters: Any, asked: Any) -> Any:
        tasks_seen.extend(asked)
        return inner(parameters, asked)

    fed.algorithm.engine.updates = spy  # type: ignore[method-assign]
    fed.apply(state, fed.sample(state, participation=1.0))
    first = tasks_seen[0].own
    assert first is not None
    assert params.digest(first) == params.digest(own)
    assert not torch.equal(first["1.running_mean"], state.carried["1.running_mean"])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(fl.FedlensError, match="batch_norm='averagd' is unknown: did you mean"):
        federation("averagd")


# --- LoRA ----------------------------------------------------------------------------------------


def lora_model(average: str) -> Classifier:
    with scoped(generator(0, "lora net")):
        body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        head = nn.Linear(6, CLASSES).requires_grad_(False)
    lora.add(body, Stream(0, ()), rank=2, alpha=4.0, layers="", average=average)
    return Classifier(body, head)


def play(model: Classifier) -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """One round of FedAvg by all clients: the algorithm's states, and what clients sent."""
    local = local_training()
    trainer = Trainer(model, examples(), shards(SIZES).shard, local, seed=0)
    algorithm = FederatedAlgorithm(
        Serial(trainer, 1), local, carried=carried.rules(model, "frozen")
    )
    state = algorithm.init(
        {n: v for n, v in model.named_parameters() if v.requires_grad},
        carried=classifier.carried(model, "frozen"),
    )
    sent: list[dict[str, torch.Tensor]] = []
    cohort = Cohort(1, (0, 1, 2), tuple(tasks(SIZES)), lr=0.1)
    following, report = algorithm.apply(
        state, cohort, on_update=lambda update, _: sent.append(params.copy(update.parameters))
    )
    return state, (following, report), sent


def test_exact_averaging_gives_the_mean_of_the_clients_weights() -> None:
    model = lora_model("products")
    state, (following, report), sent = play(model)
    total = sum(SIZES)
    for one in lora.names(model):
        start = state.carried[one.original].double()
        mean = sum(
            size * (start + one.scale * (update[one.b].double() @ update[one.a].double()))
            for size, update in zip(SIZES, sent, strict=True)
        ) / total  # fmt: skip
        global_ = one.merged({**following.trained, **following.carried})
        torch.testing.assert_close(global_.double(), mean, rtol=1e-5, atol=1e-6)
        assert one.original not in sent[0]
    assert report.bytes_up == 3 * wire.size(state.trained)
    assert report.bytes_down == 3 * wire.size({**state.trained, **state.carried})


def test_averaging_both_factors_is_not_exact_and_frozen_a_is() -> None:
    for average, exact in (("factors", False), ("frozen_a", True)):
        model = lora_model(average)
        frozen = dict(model.named_parameters())
        _, (following, _), sent = play(model)
        assert not following.carried
        for one in lora.names(model):
            a = [update.get(one.a, frozen[one.a]).double() for update in sent]
            mean = sum(
                size * update[one.b].double() @ each
                for size, update, each in zip(SIZES, sent, a, strict=True)
            ) / sum(SIZES)  # fmt: skip
            product = (
                following.trained[one.b].double()
                @ following.trained.get(one.a, frozen[one.a]).double()
            )
            assert torch.allclose(product, mean, rtol=1e-5, atol=1e-7) == exact


def test_rules_follow_from_the_model() -> None:
    assert carried.rules(lora_model("factors"), "averaged") == ()
    [rule] = carried.rules(lora_model("products"), "frozen")
    assert isinstance(rule, ExactProducts)
    assert not rule.returned
    assert carried.returned(norm_net(), "averaged") == set(batch_norm.statistics(norm_net()))
