"""The entries of a mask against boolean indexing, which is slow and obvious."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.sparse.entries import Entries

CPU = torch.device("cpu")
FORMATS = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "channels_last": lambda tensor: (
        tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    ),
    "transposed": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor,
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 1],
}
SHAPES = st.lists(st.integers(1, 5), max_size=5)


def drawn(
    shape: list[int], density: float, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=draw) < density
    return torch.randn(shape, generator=draw, dtype=dtype), mask


@settings(max_examples=60)
@given(
    SHAPES,
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(list(FORMATS)),
)
def test_entries_are_read_and_written_in_row_major_order_in_any_memory_format(
    shape: list[int], density: float, seed: int, dtype: torch.dtype, format_name: str
) -> None:
    values, mask = drawn(shape, density, seed, dtype)
    tensor = FORMATS[format_name](values.clone())
    strides, entries = tensor.stride(), Entries(FORMATS["channels_last"](mask), CPU)
    assert len(entries) == mask.count_nonzero()
    assert torch.equal(entries.taken(tensor), values[mask])
    entries.put(tensor, -2 * values[mask])
    assert tensor.stride() == strides
    assert torch.equal(tensor, torch.where(mask, -2 * values, values))


def test_taken_values_are_a_copy() -> None:
    tensor = torch.arange(4.0)
    taken = Entries(torch.tensor([True, False, True, True]), CPU).taken(tensor)
    taken.zero_()
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "factor"), [("contiguous", 1), ("channels_last", 2)])
def test_an_entry_costs_eight_bytes_and_sixteen_in_channels_last(name: str, factor: int) -> None:
    values, mask = drawn([6, 5, 4, 3], 0.3, 0, torch.float32)
    entries = Entries(mask, CPU)
    for _ in range(2):  # the second index is made once
        entries.taken(FORMATS[name](values))
    assert entries.nbytes == 8 * factor * len(entries)
