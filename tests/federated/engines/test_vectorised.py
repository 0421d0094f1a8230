from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.federated.client import LocalRules, Task, Trainer, Update
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import GROUP, Vectorised
from fedlens.rng import generator
from tests.federated.worlds import CLASSES, WIDTH, kept, linear, rules, tasks, world

SEED = 5
SIZES = [1, 3, 4, 9, 17, 6]  # less and more than a batch of 4
STEPS = [2, 7, 1, 5, 7, 3]


def both(
    asked: list[Task], given: LocalRules, examples: Any = None
) -> tuple[list[Update], list[Update]]:
    examples = examples or world(sum(len(one.shard) for one in asked))
    trainer = Trainer(linear(), examples, given, SEED)
    start = params.copy(trainer.trained)
    one_by_one = kept(Serial(trainer, 1), start, asked)
    return one_by_one, kept(Vectorised(examples, given, SEED, 1), start, asked)


def assert_same(serial: list[Update], vectorised: list[Update]) -> None:
    assert [one.task for one in serial] == [one.task for one in vectorised]
    for a, b in zip(serial, vectorised, strict=True):
        assert set(a.parameters) == set(b.parameters)
        for name, value in a.parameters.items():
            torch.testing.assert_close(b.parameters[name], value, rtol=1e-5, atol=1e-5)
        assert (a.tally.seen, a.tally.correct) == (b.tally.seen, b.tally.correct)
        assert b.tally.loss == pytest.approx(a.tally.loss, rel=1e-4)
        assert a.fault is b.fault is None


def corrected(asked: list[Task]) -> list[Task]:
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
    assert_same(*both(corrected(asked) if corrections else asked, rules(**OPTIONS[name])))


def test_groups_make_no_difference() -> None:
    count = 2 * GROUP + 3
    asked = tasks([2 + k % 7 for k in range(count)], steps=[1 + (5 * k) % 6 for k in range(count)])
    assert_same(*both(corrected(asked)[::-1], rules(momentum=0.9, step={"dropout": 0.3})))


def test_one_client_alone() -> None:
    assert_same(*both(tasks([10], steps=6), rules(momentum=0.9)))


def test_micro_batches_make_no_difference() -> None:
    assert_same(*both(tasks([10, 7], steps=6), rules(step={"micro_batch": 3})))


def test_the_batches_are_the_same_and_in_the_same_order() -> None:
    """With single examples and steps this long, any other order or mask ends up elsewhere."""
    asked = tasks([12, 12], steps=17, lr=1.0)
    given = rules(batch_size=1, step={"dropout": 0.5})
    serial, vectorised = both(asked, given)
    assert_same(serial, vectorised)
    elsewhere = kept(Vectorised(world(24), given, SEED + 1, 1), linear_start(), asked)
    for a, b in zip(serial, elsewhere, strict=True):
        assert (a.parameters["head.weight"] - b.parameters["head.weight"]).abs().max() > 0.1


def linear_start() -> dict[str, torch.Tensor]:
    return params.copy(dict(linear().named_parameters()))


def test_the_global_parameters_and_the_examples_stay_as_they_are() -> None:
    examples, start = world(40), linear_start()
    before = params.digest({**start, "x": examples.features})
    engine = Vectorised(examples, rules(momentum=0.9, step={"dropout": 0.5}), SEED, 1)
    first = kept(engine, start, tasks(SIZES))
    assert params.digest({**start, "x": examples.features}) == before
    again = kept(engine, start, tasks(SIZES))
    for a, b in zip(first, again, strict=True):
        assert params.digest(a.parameters) == params.digest(b.parameters)
    engine.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 20])
def test_a_client_that_diverges_is_faulted_as_it_would_be_alone(position: int, bad: float) -> None:
    examples = world(40)
    examples.features[position, 1] = bad
    serial, vectorised = both(tasks(SIZES, steps=9), rules(), examples)
    assert [one.fault for one in serial if one.fault] != []
    assert [one.fault for one in serial] == [one.fault for one in vectorised]
    unhurt = [one.fault is None for one in serial]
    assert_same(
        [one for one, fine in zip(serial, unhurt, strict=True) if fine],
        [one for one, fine in zip(vectorised, unhurt, strict=True) if fine],
    )


def test_a_wild_correction_ruins_its_own_client_alone() -> None:
    """A correction of 1e38 sends one client's head to infinity at the first step."""
    asked = corrected(tasks(SIZES, steps=6, lr=10.0))
    wild = {
        name: torch.full_like(value, 1e38) for name, value in (asked[3].correction or {}).items()
    }
    asked[3] = replace(asked[3], correction=wild)
    serial, vectorised = both(asked, rules())
    assert [one.task.client for one in serial if one.fault] == [3]
    assert [one.fault for one in serial] == [one.fault for one in vectorised]
    assert_same(serial[:3] + serial[4:], vectorised[:3] + vectorised[4:])
