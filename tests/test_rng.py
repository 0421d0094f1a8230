import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens import rng

ids = st.lists(st.one_of(st.integers(0, 10**6), st.text(max_size=5)), max_size=3)


@given(st.integers(0, 2**31), st.text(max_size=8), ids)
def test_an_address_is_a_function_of_its_parts(seed: int, purpose: str, rest: list) -> None:
    assert rng.address(seed, purpose, *rest) == rng.address(seed, purpose, *rest)
    assert 0 <= rng.address(seed, purpose, *rest) < 2**63


def test_addresses_differ_wherever_their_parts_do() -> None:
    parts = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", "1"), (0, "a", 1, 1), (0, "a", 11)]
    assert len({rng.address(*part) for part in parts}) == len(parts)


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    stream = rng.Stream(3, ("central", 5))
    first = torch.rand(4, generator=stream.draw("order"))
    torch.rand(100, generator=stream.draw("augment", 0))
    torch.rand(100)
    assert torch.equal(first, torch.rand(4, generator=stream.draw("order")))
    assert torch.equal(first, torch.rand(4, generator=rng.generator(3, "order", "central", 5)))


def test_a_scoped_draw_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with rng.scoped(rng.generator(0, "test")):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(before, torch.get_rng_state())
