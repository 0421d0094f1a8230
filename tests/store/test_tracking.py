import sys
import time
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.store.tracking import open_tracker

SETTINGS = {"project": "test", "mode": "offline", "config": {"seed": 0}}


def test_silence_is_the_default(tmp_path: Path) -> None:
    with open_tracker("none", tmp_path, **SETTINGS) as tracker:
        tracker.log(1, {"x": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf, inside tensorboard
def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    with open_tracker("tensorboard", tmp_path, **SETTINGS) as tracker:
        tracker.log(1, {"validation/top1": 0.25})
        tracker.log(2, {"validation/top1": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("validation/top1")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client's own dependencies
def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_tracker("wandb", tmp_path, **SETTINGS) as tracker:
        tracker.log(1, {"validation/top1": 0.25})
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (binary,) = run.glob("*.wandb")
    deadline = time.monotonic() + 20  # the client's own process flushes a moment later
    while b"validation/top1" not in binary.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_missing_extra_says_how_to_install_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FedlensError, match=rf"pip install 'fedlens\[{name}\]'"):  # noqa: SIM117
        with open_tracker(name, tmp_path, **SETTINGS):
            pass
