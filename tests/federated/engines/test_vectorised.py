from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.errors import FedlensError
from fedlens.federated.client import LocalTraining, Trainer
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import GROUP, Vectorised
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.rng import generator
from fedlens.training.optimizers import AdamW
from tests.federated.small import (
    CLASSES,
    WIDTH,
    examples,
    kept,
    linear,
    local_training,
    shards,
    tasks,
)

SEED = 5
SIZES = [1, 3, 4, 9, 17, 6]  # less and more than a batch of 4
STEPS = [2, 7, 1, 5, 7, 3]


def vectorised(
    known: FeatureExamples, sizes: list[int], given: LocalTraining, seed: int = SEED
) -> Vectorised:
    return Vectorised(
        known, shards(sizes).shard, given, seed, 1, names=("head.weight", "head.bias")
    )


def sizes_of(asked: list[ClientTask]) -> list[int]:
    """By client."""
    return [one.examples for one in sorted(asked, key=lambda one: one.client)]


def both(
    asked: list[ClientTask], given: LocalTraining, known: FeatureExamples | None = None
) -> tuple[list[ClientUpdate], list[ClientUpdate]]:
    sizes = sizes_of(asked)
    known = known or examples(sum(sizes))
    trainer = Trainer(linear(), known, shards(sizes).shard, given, SEED)
    start = params.copy(trainer.trained)
    one_by_one = kept(Serial(trainer, 1), start, asked)
    return one_by_one, kept(vectorised(known, sizes, given), start, asked)


def assert_same(serial: list[ClientUpdate], together: list[ClientUpdate]) -> None:
    assert [one.task for one in serial] == [one.task for one in together]
    for a, b in zip(serial, together, strict=True):
        assert set(a.parameters) == set(b.parameters)
        for name, value in a.parameters.items():
            torch.testing.assert_close(b.parameters[name], value, rtol=1e-5, atol=1e-5)
        assert a.tally is not None
        assert b.tally is not None
        assert (a.tally.seen, a.tally.correct) == (b.tally.seen, b.tally.correct)
        assert b.tally.loss == pytest.approx(a.tally.loss, rel=1e-4)
        assert a.fault is b.fault is None


def corrected(asked: list[ClientTask]) -> list[ClientTask]:
    draw = generator(0, "corrections")
    return [
        replace(
            one,
            correction={
                "head.weight": 0.3 * torch.randn(CLASSES, WIDTH, generator=draw),
                "head.bias": 0.3 * torch.randn(CLASSES, generator=draw),
            },
        )
        for one in asked
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "proximal": {"proximal": 0.7},
    "smoothing": {"step": {"label_smoothing": 0.2}},
    "dropout": {"step": {"dropout": 0.4}},
    "clipping": {"step": {"clip_norm": 0.2}},
    "loose clipping": {"step": {"clip_norm": 100.0}},
    "all": {
        "momentum": 0.8,
        "weight_decay": 0.05,
        "nesterov": True,
        "proximal": 0.3,
        "step": {"label_smoothing": 0.1, "dropout": 0.2, "clip_norm": 0.5},
    },
}


@pytest.mark.parametrize("corrections", [False, True], ids=["free", "corrected"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_cohort_side_by_side_is_the_cohort_one_by_one(name: str, corrections: bool) -> None:
    asked = tasks(SIZES, steps=STEPS, lr=0.2)
    assert_same(*both(corrected(asked) if corrections else asked, local_training(**OPTIONS[name])))


def test_groups_make_no_difference() -> None:
    count = 2 * GROUP + 3
    asked = tasks([2 + k % 7 for k in range(count)], steps=[1 + (5 * k) % 6 for k in range(count)])
    assert_same(*both(corrected(asked)[::-1], local_training(momentum=0.9, step={"dropout": 0.3})))


def test_one_client_alone() -> None:
    assert_same(*both(tasks([10], steps=6), local_training(momentum=0.9)))


def test_micro_batches_make_no_difference() -> None:
    assert_same(*both(tasks([10, 7], steps=6), local_training(step={"micro_batch": 3})))


def test_the_batches_are_the_same_and_in_the_same_order() -> None:
    """With single examples and steps this long, any other order or mask ends up elsewhere."""
    asked = tasks([12, 12], steps=17, lr=1.0)
    given = local_training(batch_size=1, step={"dropout": 0.5})
    serial, together = both(asked, given)
    assert_same(serial, together)
    other = vectorised(examples(24), [12, 12], given, SEED + 1)
    elsewhere = kept(other, linear_start(), asked)
    for a, b in zip(serial, elsewhere, strict=True):
        assert (a.parameters["head.weight"] - b.parameters["head.weight"]).abs().max() > 0.1


def linear_start() -> dict[str, torch.Tensor]:
    return params.copy(dict(linear().named_parameters()))


def test_the_global_parameters_and_the_examples_stay_as_they_are() -> None:
    known, start = examples(40), linear_start()
    before = params.digest({**start, "x": known.features})
    engine = vectorised(known, SIZES, local_training(momentum=0.9, step={"dropout": 0.5}))
    first = kept(engine, start, tasks(SIZES))
    assert params.digest({**start, "x": known.features}) == before
    again = kept(engine, start, tasks(SIZES))
    for a, b in zip(first, again, strict=True):
        assert params.digest(a.parameters) == params.digest(b.parameters)
    engine.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 20])
def test_a_client_that_diverges_is_faulted_as_it_would_be_alone(position: int, bad: float) -> None:
    known = examples(40)
    known.features[position, 1] = bad
    serial, together = both(tasks(SIZES, steps=9), local_training(), known)
    assert [one.fault for one in serial if one.fault] != []
    assert [one.fault for one in serial] == [one.fault for one in together]
    unhurt = [one.fault is None for one in serial]
    assert_same(
        [one for one, fine in zip(serial, unhurt, strict=True) if fine],
        [one for one, fine in zip(together, unhurt, strict=True) if fine],
    )


def test_a_wild_correction_ruins_its_own_client_alone() -> None:
    """A correction of 1e38 sends one client's head to infinity at the first step."""
    asked = corrected(tasks(SIZES, steps=6, lr=10.0))
    wild = {
        name: torch.full_like(value, 1e38) for name, value in (asked[3].correction or {}).items()
    }
    asked[3] = replace(asked[3], correction=wild)
    serial, together = both(asked, local_training())
    assert [one.task.client for one in serial if one.fault] == [3]
    assert [one.fault for one in serial] == [one.fault for one in together]
    assert_same(serial[:3] + serial[4:], together[:3] + together[4:])


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(FedlensError, match="with SGD only"):
        vectorised(examples(), SIZES, replace(local_training(), optimizer=AdamW()))
