import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedlens import params
from fedlens.arithmetic import task_vectors as tv
from fedlens.errors import FedlensError

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)


def model(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,), "s": (), "none": (0,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def one(*values: float, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=dtype)}


def test_the_arithmetic_by_hand() -> None:
    base, tuned = one(1.0, 2.0, dtype=torch.float32), one(1.5, 0.0, dtype=torch.float32)
    vector = tv.task_vector(base, tuned)
    assert vector["w"].tolist() == [0.5, -2.0]
    assert vector["w"].dtype == torch.float64
    assert tv.scaled(vector, 0.5)["w"].tolist() == [0.25, -1.0]
    assert tv.negated(vector)["w"].tolist() == [-0.5, 2.0]
    assert tv.added(vector, vector, one(1.0, 1.0))["w"].tolist() == [2.0, -3.0]
    assert tv.composed([(2.0, vector), (-1.0, one(1.0, 1.0))])["w"].tolist() == [0.0, -5.0]
    assert tv.applied(base, vector, 2.0)["w"].tolist() == [2.0, -2.0]
    assert tv.applied(base, tv.negated(vector))["w"].tolist() == [0.5, 4.0]
    assert tv.lerp(base, tuned, 0.5)["w"].tolist() == [1.25, 1.0]
    assert tv.lerp(base, tuned, 2.0)["w"].tolist() == [2.0, -2.0]


def test_lengths_and_angles_by_hand() -> None:
    assert tv.dot(one(1.0, 2.0), one(3.0, -1.0)) == 1.0
    assert tv.norm(one(3.0, 4.0)) == 5.0
    assert tv.cosine(one(1.0, 0.0), one(1.0, 1.0)) == pytest.approx(1 / math.sqrt(2))
    assert tv.cosine(one(1.0, 2.0), one(-3.0, -6.0)) == pytest.approx(-1.0)
    assert tv.cosine(one(1.0, 2.0), one(0.0, 0.0)) is None


def test_a_flat_vector_has_its_tensors_in_the_order_of_their_names() -> None:
    vector = {"b": torch.tensor([[3.0], [4.0]]), "a": torch.tensor(1.0), "c": torch.zeros(0)}
    assert tv.flat(vector).tolist() == [1.0, 3.0, 4.0]
    assert tv.norm(vector) == pytest.approx(float(tv.flat(vector).norm()))


@given(st.lists(st.tuples(singles, singles), min_size=1, max_size=20))
def test_a_base_and_its_task_vector_are_the_tuned_model_exactly(
    pairs: list[tuple[float, float]],
) -> None:
    assume(all(t == 0 or abs(b) < 2**28 * abs(t) for b, t in pairs))
    base = one(*(b for b, _ in pairs), dtype=torch.float32)
    tuned = one(*(t for _, t in pairs), dtype=torch.float32)
    found = tv.applied(base, tv.task_vector(base, tuned))
    assert found["w"].dtype == torch.float32
    assert torch.equal(found["w"], tuned["w"])


@given(st.integers(0, 999), st.integers(0, 999))
def test_both_ends_of_the_line_are_the_models_bit_by_bit(seed: int, other: int) -> None:
    base, tuned = model(seed), model(other)
    vector = tv.task_vector(base, tuned)
    assert params.digest(tv.applied(base, vector, 0.0)) == params.digest(base)
    assert params.digest(tv.applied(base, vector)) == params.digest(tuned)
    assert params.digest(tv.lerp(base, tuned, 0.0)) == params.digest(base)
    assert params.digest(tv.lerp(base, tuned, 1.0)) == params.digest(tuned)
    doubled = (
        {n: v.double() / 3 for n, v in base.items()},
        {n: v.double() for n, v in tuned.items()},
    )
    assert params.digest(tv.lerp(*doubled, 1.0)) == params.digest(doubled[1])


@given(singles, st.floats(-3, 3))
def test_an_entry_that_no_task_moved_keeps_its_bits(value: float, alpha: float) -> None:
    base = one(value, -0.0, 0.0, dtype=torch.float32)
    expected = params.digest(base)
    assert params.digest(tv.applied(base, tv.task_vector(base, base), alpha)) == expected
    assert torch.equal(tv.lerp(base, base, alpha)["w"], base["w"])


@given(st.integers(0, 99), st.floats(-2, 2), st.floats(-2, 2))
def test_a_composition_is_the_sum_of_its_scaled_parts(seed: int, a: float, b: float) -> None:
    first, second = model(seed), model(seed + 1)
    found = tv.composed([(a, first), (b, second)])
    parts = tv.added(tv.scaled(first, a), tv.scaled(second, b))
    assert params.mismatch(first, found) is None
    torch.testing.assert_close(tv.flat(found), tv.flat(parts), rtol=0, atol=1e-14)


def test_a_composition_reads_one_term_at_a_time_and_changes_none() -> None:
    first = one(1.0)

    def terms() -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
        for _ in range(3):
            yield 1.0, first

    assert tv.composed(terms())["w"].tolist() == [3.0]
    assert first["w"].tolist() == [1.0]
    with pytest.raises(ValueError, match="at least one"):
        tv.composed([])


def test_parameters_that_train_can_be_given_as_they_are() -> None:
    base = {"w": torch.nn.Parameter(torch.ones(2))}
    vector = tv.task_vector(base, {"w": torch.nn.Parameter(torch.zeros(2))})
    found = [vector, tv.applied(base, vector), tv.lerp(base, base, 0.5), tv.composed([(1.0, base)])]
    assert not any(each["w"].requires_grad for each in found)
    assert tv.dot(base, vector) == -2.0


@pytest.mark.parametrize("call", [tv.task_vector, tv.applied, tv.dot, tv.added, tv.cosine])
def test_maps_that_do_not_match_are_refused(call: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"w has shape \(2,\) instead of \(1,\)"):
        call(one(1.0), one(1.0, 2.0))
    with pytest.raises(ValueError, match="missing w; unexpected v"):
        call(one(1.0), {"v": torch.ones(1)})


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))


def test_a_module_may_stand_on_either_side() -> None:
    base, tuned = network(0), network(1)
    maps = [dict(model.named_parameters()) for model in (base, tuned)]
    expected = params.digest(tv.task_vector(*maps))
    for pair in ((base, tuned), (base, maps[1]), (maps[0], tuned)):
        assert params.digest(tv.task_vector(*pair)) == expected
    some = {"0.bias": maps[1]["0.bias"]}
    assert set(tv.task_vector(base, some)) == {"0.bias"}
    assert set(tv.task_vector(some, base)) == {"0.bias"}
    assert "1.running_mean" in tv.task_vector(base, tuned.state_dict())
    with pytest.raises(FedlensError, match=r"no parameter 2\.weight"):
        tv.task_vector(base, {"2.weight": torch.zeros(1)})


def test_a_vector_is_applied_in_place_and_its_negation_takes_it_back() -> None:
    base, tuned = network(0), network(1)
    start = {name: value.data_ptr() for name, value in base.named_parameters()}
    before, vector = params.digest(base.state_dict()), tv.task_vector(base, tuned)
    tv.apply_task_vector(base, vector)
    assert params.digest(base.state_dict()) == params.digest(tuned.state_dict())
    tv.apply_task_vector(base, vector, scale=-1.0)
    assert params.digest(base.state_dict()) == before
    assert {name: value.data_ptr() for name, value in base.named_parameters()} == start
    assert all(value.requires_grad for value in base.parameters())
    tv.apply_task_vector(base, {"0.bias": torch.ones(4)}, scale=2.0)
    untouched = dict(network(0).named_parameters())
    assert torch.equal(base[0].bias, untouched["0.bias"] + 2)
    assert torch.equal(base[0].weight, untouched["0.weight"])
    with pytest.raises(FedlensError, match="no parameter w"):
        tv.apply_task_vector(base, {"w": torch.ones(1)})
