"""Trackers send a run's scalars to TensorBoard or Weights & Biases. Off by default.

Results come from the run's own records only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedlens.errors import FedlensError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """Sends nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Each session writes its own file; an epoch that is repeated after a kill is in two files.
        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, project: str, mode: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=project,
            mode="online" if mode == "online" else "offline",
            dir=folder,
            id=folder.name,
            name=folder.name,
            resume="allow" if mode == "online" else None,
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


@contextmanager
def open_tracker(
    name: str, folder: Path, *, project: str, mode: str, config: Mapping[str, Any]
) -> Iterator[Tracker]:
    """The tracker of that name; it writes below `folder` and is closed at the end."""
    makers: dict[str, Callable[[], Tracker]] = {
        "none": NoTracker,
        "tensorboard": lambda: TensorBoard(folder),
        "wandb": lambda: WeightsAndBiases(folder, project, mode, config),
    }
    try:
        tracker = makers[name]()
    except ImportError as error:
        raise FedlensError(
            f"tracker={name} needs an extra package: install it with "
            f"`pip install 'fedlens[{name}]'`, or use tracker=none."
        ) from error
    except Exception as error:  # of the tracker's package: no account, no server, no disk space
        raise FedlensError(
            f"tracker={name} could not start ({error}): use tracker=none, or mode=offline."
        ) from error
    try:
        yield tracker
    finally:
        tracker.close()
