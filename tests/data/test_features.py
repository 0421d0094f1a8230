import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from fedlens import files, rng
from fedlens.data import features as module
from fedlens.data.examples import FeatureExamples
from fedlens.data.features import features
from fedlens.errors import FedlensError

KEY = {"data": "abc", "split": "train", "resolution": 96}
COUNT, BATCH = 50, 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 10)  # 5 chunks of 3 batches each: 4, 4 and 2 examples


@pytest.fixture
def examples() -> FeatureExamples:
    values = torch.randn(COUNT, 6, generator=rng.generator(0, "test features"))
    return FeatureExamples(values, torch.zeros(COUNT, dtype=torch.int64))


class Counting:
    """A little backbone that counts the examples it has seen and may die on the way."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.batches, self.seen, self.dies_after = 0, 0, dies_after
        self.weight = torch.randn(3, 6, generator=rng.generator(0, "weight")).requires_grad_()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.batches == self.dies_after:
            raise KeyboardInterrupt
        self.batches += 1
        self.seen += len(inputs)
        return torch.tanh(inputs @ self.weight.T)


Get = Callable[..., torch.Tensor]


@pytest.fixture
def get(examples: FeatureExamples, tmp_path: Path) -> Get:
    def of(
        extract: Counting, key: dict[str, object] | None = None, **others: object
    ) -> torch.Tensor:
        chosen = {"root": tmp_path, "batch_size": BATCH, **others}
        return features(examples, extract, key=key or KEY, **chosen)  # type: ignore[arg-type]

    return of


def entry(root: Path) -> Path:
    (folder,) = (root / "features").iterdir()
    return folder


def test_equal_to_direct_computation_and_computed_once(
    examples: FeatureExamples, get: Get, tmp_path: Path
) -> None:
    first, second, steps = Counting(), Counting(), []
    found = get(first, progress=lambda done, total: steps.append((done, total)))
    torch.testing.assert_close(found, first(examples.features).detach())
    assert (found.dtype, found.shape, found.requires_grad) == (torch.float32, (COUNT, 3), False)
    assert steps[:4] == [(4, 50), (8, 50), (10, 50), (14, 50)]
    assert steps[-1] == (50, 50)
    assert torch.equal(get(second), found)
    assert second.seen == 0
    assert sorted(path.name for path in entry(tmp_path).iterdir() if path.name != "lock") == [
        "features.safetensors",
        "key.json",
    ]
    assert KEY.items() <= json.loads((entry(tmp_path) / "key.json").read_text()).items()


def test_a_head_can_be_trained_on_the_result(get: Get) -> None:
    for found in (get(Counting()), get(Counting())):  # as built, and as read
        head = torch.nn.Linear(3, 2)
        head(found).sum().backward()
        assert head.weight.grad is not None


@pytest.mark.parametrize("dies_after", [0, 1, 3, 7, 14])
def test_a_killed_build_resumes_bit_identical(get: Get, tmp_path: Path, dies_after: int) -> None:
    whole = get(Counting(), root=tmp_path / "uninterrupted")
    with pytest.raises(KeyboardInterrupt):
        get(Counting(dies_after), root=tmp_path / "killed")
    resumed = Counting()
    assert torch.equal(get(resumed, root=tmp_path / "killed"), whole)
    assert resumed.seen == COUNT - 10 * (dies_after // 3)
    stored = [entry(tmp_path / name) for name in ("uninterrupted", "killed")]
    contents = [(folder / "features.safetensors").read_bytes() for folder in stored]
    assert contents[0] == contents[1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit])
def test_a_damaged_chunk_is_computed_again(
    get: Get, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        get(Counting(dies_after=9))
    damage(entry(tmp_path) / "chunks" / "00001.safetensors")
    resumed = Counting()
    with caplog.at_level(logging.WARNING):
        found = get(resumed)
    assert "is damaged" in caplog.text
    assert resumed.seen == 30  # the damaged chunk and the two that were missing
    assert torch.equal(found, get(Counting(), root=tmp_path / "other"))


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit])
def test_a_damaged_entry_is_computed_again(
    get: Get, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    whole = get(Counting()).clone()
    damage(entry(tmp_path) / "features.safetensors")
    again = Counting()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(get(again), whole)
    assert "is damaged" in caplog.text
    assert again.seen == COUNT


def test_another_key_is_another_entry(get: Get, tmp_path: Path) -> None:
    get(Counting())
    other = Counting()
    get(other, {**KEY, "resolution": 224})
    assert other.seen == COUNT
    assert len(list((tmp_path / "features").iterdir())) == 2
    reordered = Counting()
    get(reordered, dict(reversed(KEY.items())))
    assert reordered.seen == 0


def test_features_that_are_not_finite_are_refused(examples: FeatureExamples, get: Get) -> None:
    examples.features[23, 0] = torch.nan
    with pytest.raises(FedlensError, match="example 23"):
        get(Counting())


def test_features_of_another_shape_are_refused(examples: FeatureExamples, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shape"):
        features(examples, lambda x: x[:, :, None], key=KEY, root=tmp_path)


def test_the_cache_folder_is_the_default(
    examples: FeatureExamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    features(examples, Counting(), key=KEY)
    assert (entry(tmp_path) / "features.safetensors").is_file()


def test_a_second_builder_waits_and_then_reads(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "POLL_S", 30)  # it is let in before it would help
    builders = [Counting(), Counting()]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(get, builders))
    assert torch.equal(*found)
    assert sorted(builder.seen for builder in builders) == [0, COUNT]


def test_who_waits_makes_chunks_that_are_missing(
    examples: FeatureExamples, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five chunks the builder is kept in its first until the other has made the rest."""
    monkeypatch.setattr(files, "POLL_S", 0.01)
    begun, helped = Event(), Event()

    class Kept(Counting):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert helped.wait(30)
            return super().__call__(inputs)

    class Helping(Counting):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            found = super().__call__(inputs)
            if self.seen == COUNT - 10:
                helped.set()
            return found

    kept, helping = Kept(), Helping()
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(get, kept)
        assert begun.wait(30)
        found = get(helping)
        assert torch.equal(found, building.result())
    torch.testing.assert_close(found, Counting()(examples.features).detach())
    assert helping.seen == COUNT - 10
    assert kept.seen <= 20  # its first chunk, and maybe the last that the other was about to store


def test_a_stop_request_comes_through_while_another_builds(get: Get) -> None:
    begun, enough, idle = Event(), Event(), Counting()

    class Slow(Counting):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            begun.set()
            enough.wait()
            return super().__call__(inputs)

    def stop() -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(get, Slow())
        begun.wait()
        with pytest.raises(KeyboardInterrupt):
            get(idle, check=stop)
        enough.set()
        assert torch.equal(get(idle), building.result())
    assert idle.seen == 0


def test_chunks_left_by_a_kill_at_the_very_end_are_cleared(get: Get, tmp_path: Path) -> None:
    get(Counting())
    leftover = entry(tmp_path) / "chunks" / "00000.safetensors"
    leftover.parent.mkdir()
    leftover.write_bytes(b"no longer needed")
    get(Counting())
    assert not leftover.parent.exists()
