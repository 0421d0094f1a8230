"""The disk cache: what is read is what was stored, and a digest is computed where it can differ."""

from pathlib import Path

import pytest
import torch

from fedlens import cache, params


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each digest of tensors."""
    counted: list[int] = []
    digest = params.digest

    def count(tensors: params.Params) -> str:
        counted.append(1)
        return digest(tensors)

    monkeypatch.setattr(params, "digest", count)
    return counted


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("size", [10, cache.LARGE])
def test_damage_is_found_also_in_a_file_that_was_read_before(tmp_path: Path, size: int) -> None:
    path = tmp_path / "tensors.safetensors"
    stored = {"values": torch.arange(size, dtype=torch.uint8)}
    cache.store(path, stored)
    for _ in range(2):
        found = cache.recall(path)
        assert found is not None
        assert torch.equal(found["values"], stored["values"])
    flip_last_bit(path)
    assert cache.recall(path) is None
    assert torch.equal(cache.cached(path, lambda: stored)["values"], stored["values"])
    assert cache.recall(path) is not None


def test_the_digest_of_a_large_file_is_computed_once(tmp_path: Path, digests: list[int]) -> None:
    path = tmp_path / "tensors.safetensors"
    cache.store(path, {"values": torch.zeros(cache.LARGE, dtype=torch.uint8)})
    digests.clear()
    for _ in range(3):
        assert cache.recall(path) is not None
    assert len(digests) == 1
    flip_last_bit(path)
    assert cache.recall(path) is None
    assert len(digests) == 2
