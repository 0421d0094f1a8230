"""Finished and unfinished runs as a pandas table, one row for each run. No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.store.run_folder import RunFolder, find_runs

if TYPE_CHECKING:
    import pandas

LABELS = ("data", "backbone", "head", "trainable", "mask_rule", "partition", "algorithm")
WHOLE = ("seed", "clients", "local_steps", "chosen_round")
REAL = (
    "density", "validation_top1", "validation_loss", "test_top1", "test_loss", "seconds",
)  # fmt: skip


def load_runs(path: str | Path) -> "pandas.DataFrame":
    """Reads runs into a table: what each is, how it ended, and its config where runs differ.

    Args:
        path: A folder with runs, an archive of runs (`fedlens records`), or one run's folder.

    Returns:
        One row for each run, sorted by name. Accuracies are between 0 and 1; what a run does not
        have (the test accuracy of an unfinished run, the density of a dense one) is missing.
        `chosen_round` is the round, or the epoch of central training, whose parameters were tested.
        Every config key whose value differs between the runs is a column of its own.

    Examples:
        >>> import fedlens as fl
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for seed in (0, 1):
        ...         run = Path(folder) / f"fedavg_s{seed}"
        ...         run.mkdir()
        ...         config = f"{{experiment: fedavg_iid, seed: {seed}, train: {{lr: 0.{seed}1}}}}"
        ...         _ = (run / "config.yaml").write_text(config)
        ...         _ = (run / "result.json").write_text('{"test": {"top1": 0.5, "loss": 2.0}}')
        ...     table = fl.load_runs(folder)
        >>> table[["name", "state", "seed", "test_top1", "train.lr"]]
                name     state  seed  test_top1  train.lr
        0  fedavg_s0  finished     0        0.5      0.01
        1  fedavg_s1  finished     1        0.5      0.11
    """
    import pandas

    folders = sorted(find_runs(Path(path)), key=lambda run: run.name)
    configs = [dict(_leaves(folder.read_config())) for folder in folders]
    rows = [_row(folder, config) for folder, config in zip(folders, configs, strict=True)]
    differing = [key for key in _differing(configs) if key not in rows[0]]
    for row, config in zip(rows, configs, strict=True):
        row |= {key: config.get(key) for key in differing}
    whole: dict[str, Any] = dict.fromkeys(WHOLE, "Int64")  # the integers that may be missing
    real: dict[str, Any] = dict.fromkeys(REAL, "float64")
    return pandas.DataFrame(rows).astype({**whole, **real})


def _row(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    result = folder.result or {}
    labels = (folder.manifest or result).get("labels", {})
    validation, test = result.get("validation") or {}, result.get("test") or {}
    clients = config.get("federated.clients")
    return {
        "name": folder.name,
        "state": folder.state(),
        "experiment": config.get("experiment"),
        "seed": config.get("seed"),
        **{name: labels.get(name) for name in LABELS},
        "backbone": labels.get("backbone", config.get("backbone.name")),
        "density": config.get("sparse.density"),
        "clients": clients,
        "local_steps": None if clients is None else config.get("federated.local_steps"),
        "validation_top1": validation.get("top1"),
        "validation_loss": validation.get("loss"),
        "test_top1": test.get("top1"),
        "test_loss": test.get("loss"),
        "chosen_round": result.get("choice", {}).get("unit"),
        "seconds": result.get("seconds"),
    }


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; lists become tuples, so that a column can be grouped by."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", tuple(value) if isinstance(value, list) else value


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all configs; a key may be missing in some."""
    return [
        key
        for key in sorted({key for config in configs for key in config})
        if len({json.dumps(config.get(key), default=str) for config in configs}) > 1
    ]
