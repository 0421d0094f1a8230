from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.sparse.mask_files import load, save
from fedlens.sparse.masks import Masks

PROVENANCE = {"rule": "least_sensitive", "density": 0.1, "seeds": [1, 2], "data": {"of": "β"}}


def drawn(seed: int = 0, **shapes: tuple[int, ...]) -> Masks:
    draw = torch.Generator().manual_seed(seed)
    shapes = shapes or {"z": (5, 7), "a": (3,), "m": (2, 3, 4, 4)}
    return {name: torch.rand(shape, generator=draw) < 0.4 for name, shape in shapes.items()}


@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple), seed=st.integers(0, 99)
)
def test_masks_of_any_shape_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], seed: int
) -> None:
    path = tmp_path_factory.mktemp("masks") / "masks.safetensors"
    masks = drawn(seed, w=shape, other=(3, 3))
    save(path, masks, PROVENANCE)
    found, provenance = load(path)
    assert params.digest(found) == params.digest(masks)
    assert list(found) == list(masks)
    assert all(mask.dtype == torch.bool for mask in found.values())
    assert provenance == PROVENANCE


@pytest.mark.parametrize("value", [False, True])
def test_all_or_nothing_comes_back(tmp_path: Path, value: bool) -> None:
    masks = {"w": torch.full((13, 3), value)}
    save(tmp_path / "m", masks, {})
    assert torch.equal(load(tmp_path / "m")[0]["w"], masks["w"])


def test_a_mask_that_is_a_view_is_saved_in_its_own_order(tmp_path: Path) -> None:
    mask = drawn(w=(6, 4))["w"].T
    save(tmp_path / "m", {"w": mask}, {})
    assert torch.equal(load(tmp_path / "m")[0]["w"], mask)


def test_a_weight_takes_one_bit(tmp_path: Path) -> None:
    masks = drawn(w=(500, 400), v=(1001,))
    save(tmp_path / "m", masks, {"rule": "random"})
    size = (tmp_path / "m").stat().st_size
    assert 200_000 / 8 + 126 <= size <= 200_000 / 8 + 126 + 1000


def test_the_lowest_bit_of_a_byte_comes_first(tmp_path: Path) -> None:
    """The layout is a promise to files already written."""
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 1] = mask[1, 3] = True  # bits 1 and 8
    save(tmp_path / "m", {"w": mask}, {})
    with safe_open(tmp_path / "m", framework="pt") as stored:
        assert stored.get_tensor("w").tolist() == [2, 1]


def test_equal_masks_make_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tmp_path / name, drawn(), PROVENANCE)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path / "m", drawn(0), {})
    save(tmp_path / "m", drawn(1), {})
    assert params.digest(load(tmp_path / "m")[0]) == params.digest(drawn(1))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_json_cannot_hold_is_no_provenance_and_harms_no_file(tmp_path: Path) -> None:
    save(tmp_path / "m", drawn(), {})
    with pytest.raises(ValueError):
        save(tmp_path / "m", drawn(1), {"density": float("nan")})
    assert params.digest(load(tmp_path / "m")[0]) == params.digest(drawn())


def test_no_flipped_byte_goes_unseen(tmp_path: Path) -> None:
    """Wherever it lies: header, shapes, provenance, seal or bits."""
    path = tmp_path / "m"
    masks = drawn(w=(4, 8), v=(3, 16))  # whole bytes: no padding, where a flip means nothing
    save(path, masks, PROVENANCE)
    content = path.read_bytes()
    blanks = {place for place, byte in enumerate(content) if byte == ord(" ")}
    for place in set(range(len(content))) - blanks:
        broken = bytearray(content)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(FedlensError):
            load(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "m", drawn(), PROVENANCE)
    content = (tmp_path / "m").read_bytes()
    for length in (0, 5, len(content) // 2, len(content) - 1):
        (tmp_path / "m").write_bytes(content[:length])
        with pytest.raises(FedlensError, match="is damaged"):
            load(tmp_path / "m")


def test_a_foreign_or_missing_file_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "weights")
    with pytest.raises(FedlensError, match="does not hold masks"):
        load(tmp_path / "weights")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(FedlensError, match="is damaged"):
        load(tmp_path / "text")
    with pytest.raises(FedlensError, match="no masks at"):
        load(tmp_path / "nowhere")
