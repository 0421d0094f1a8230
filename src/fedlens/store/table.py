"""Finished and unfinished runs as tables: a row for each run, or for each epoch or round. No torch.

The same columns are printed by `fedlens ls --json` and `--csv`, which do not need pandas.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.errors import FedlensError
from fedlens.paths import expanded
from fedlens.store.run_folder import RunFolder, find_runs

if TYPE_CHECKING:
    import pandas

LABELS = ("data", "head", "trainable", "mask_rule", "partition", "algorithm")
INTEGERS = ("seed", "clients", "local_steps", "chosen_round")
REALS = (
    "density", "validation_top1", "validation_loss", "test_top1", "test_loss", "seconds",
)  # fmt: skip
IDENTITY = (  # what a run is
    "name", "state", "experiment", "seed", "data", "backbone", "head", "trainable", "mask_rule",
    "partition", "algorithm", "density", "clients", "local_steps",
)  # fmt: skip
OUTCOME = (  # how it ended
    "validation_top1", "validation_loss", "test_top1", "test_loss", "chosen_round", "seconds",
    "error",
)  # fmt: skip
COLUMNS = (*IDENTITY, *OUTCOME)
UNREADABLE = "unreadable"  # the state of a run whose records are damaged
SETTING = ("experiment", "seed", "backbone", "density", "clients", "local_steps")

Row = dict[str, Any]


def load_runs(path: str | Path) -> "pandas.DataFrame":
    """Reads runs into a table: what each is, how it ended, and its config where runs differ.

    Args:
        path: A folder with runs, an archive of runs (`fedlens records`), or one run's folder.

    Returns:
        One row for each run, sorted by name. Accuracies are between 0 and 1; what a run does not
        have (the test accuracy of an unfinished run, the density of a dense one) is missing.
        `chosen_round` is the round, or the epoch of central training, whose parameters were tested.
        `state` is finished, running, interrupted or failed; a run whose records are damaged is
        unreadable, and `error` says why, as it does for a failed run.
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

    rows, configs = [], []
    for folder in _folders(path):
        row, config = run_row(folder), None
        try:
            config = dict(_leaves(folder.read_config()))
        except FedlensError as error:
            row = _unreadable(folder, error)
        rows.append(row)
        configs.append(config)
    readable = [config for config in configs if config is not None]
    differing = [key for key in _differing(readable) if key not in COLUMNS]
    for row, config in zip(rows, configs, strict=True):
        row |= {key: (config or {}).get(key) for key in differing}
    return _typed(pandas.DataFrame(rows))


def load_metrics(path: str | Path) -> "pandas.DataFrame":
    """Reads the learning curves of runs into one table: a row for each run and epoch or round.

    Args:
        path: A folder with runs, an archive of runs (`fedlens records`), or one run's folder.

    Returns:
        Rows sorted by the run's name, then in order of time. What each run is comes first, in the
        columns of `load_runs` from `name` to `local_steps`. `unit` is epoch for central training
        and round for a federated run, and `round` is its number; 0 is before training. A column
        for each number that was recorded follows: `lr`, `train_loss`, `train_accuracy`,
        `validation_loss`, `validation_top1`, `validation_top5`, in federated runs `bytes_up`,
        `bytes_down`, `drift`, `cosine`, `sign_agreement`, `per_client_mean`,
        `per_client_worst_decile`, and further diagnostics by their names (`metric_NAME` if NAME is
        a column already); with a test curve also `test_curve_top1` and so on. What was not recorded
        in a round is missing. Lists with a value for each client are left out: they are in the
        run's metrics.jsonl.

    Examples:
        >>> import fedlens as fl
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     run = Path(folder) / "fedavg"
        ...     run.mkdir()
        ...     _ = (run / "config.yaml").write_text("{experiment: fedavg_iid, seed: 0}")
        ...     _ = (run / "metrics.jsonl").write_text(
        ...         '{"round": 0, "validation": {"loss": 4.6, "top1": 0.1}}\\n'
        ...         '{"round": 1, "drift": 0.5, "validation": {"loss": 2.3, "top1": 0.4}}\\n'
        ...     )
        ...     table = fl.load_metrics(folder)
        >>> table[["name", "seed", "round", "drift", "validation_top1"]]
             name  seed  round  drift  validation_top1
        0  fedavg     0      0    NaN              0.1
        1  fedavg     0      1    0.5              0.4
    """
    import pandas

    rows = [row for folder in _folders(path) for row in _metrics_rows(folder)]
    first = (*IDENTITY, "unit", "round")
    measured = dict.fromkeys(key for row in rows for key in row if key not in first)
    table = _typed(pandas.DataFrame(rows, columns=[*first, *measured]))
    return table.astype({"round": "int64"} | {key: _kind(rows, key) for key in measured})


def run_row(folder: RunFolder) -> Row:
    """What `load_runs` says of a run, without the keys of its config: a value for every column."""
    try:
        with folder.named_in_errors():
            return _checked(folder, {**_identity(folder), **_outcome(folder)})
    except FedlensError as error:
        return _unreadable(folder, error)


def matches(folder: RunFolder, text: str) -> bool:
    """Whether a run's name, state, experiment or one of its labels contains `text`, in any case."""
    row = run_row(folder)
    words = (row[key] for key in ("name", "state", "experiment", "backbone", *LABELS))
    return any(text.casefold() in str(word).casefold() for word in words if word is not None)


def run_record(folder: RunFolder) -> Row:
    """All records of a run in one; of the partition, without the counts of every client."""
    partition = folder.partition or {}
    summary = {key: value for key, value in partition.items() if key != "histogram"}
    return {
        "name": folder.name,
        "state": folder.state(),
        "error": folder.failure,
        "path": str(folder.path),
        "config": folder.read_config(),
        "manifest": folder.manifest,
        "result": folder.result,
        "partition": summary or None,
        "metrics": folder.journal("metrics").read(),
        "test_curve": folder.journal("test_curve").read(),
    }


def _folders(path: str | Path) -> list[RunFolder]:
    path = expanded(path)
    if not path.exists():
        raise FedlensError(f"No runs at {path}: there is no such folder or archive.")
    return sorted(find_runs(path), key=lambda run: run.name)


def _identity(folder: RunFolder) -> Row:
    """From the manifest, which is faster to read than the config; it is written a moment later."""
    record = folder.manifest or folder.result or {}
    labels = _part(record, "labels", folder)
    setting: Mapping[str, Any] = record
    if not {"experiment", "seed"} <= record.keys():
        config = dict(_leaves(folder.read_config()))
        setting = {
            "experiment": config.get("experiment"),
            "seed": config.get("seed"),
            "backbone": config.get("backbone.name"),
            "density": config.get("sparse.density"),
            "clients": config.get("federated.clients"),
            "local_steps": config.get("federated.local_steps"),
        }
    known = {
        "name": folder.name,
        "state": folder.state(),
        **{key: setting.get(key) for key in SETTING},
        **{key: labels.get(key) for key in LABELS},
    }
    if known["clients"] is None:  # a config has a number of local steps all the same
        known["local_steps"] = None
    return {key: known[key] for key in IDENTITY}


def _outcome(folder: RunFolder) -> Row:
    result = folder.result or {}
    validation, test, choice = (
        _part(result, key, folder) for key in ("validation", "test", "choice")
    )
    known = {
        "validation_top1": validation.get("top1"),
        "validation_loss": validation.get("loss"),
        "test_top1": test.get("top1"),
        "test_loss": test.get("loss"),
        "chosen_round": choice.get("unit"),
        "seconds": result.get("seconds"),
        "error": folder.failure,
    }
    return {key: known[key] for key in OUTCOME}


def _unreadable(folder: RunFolder, error: FedlensError) -> Row:
    row = dict.fromkeys(COLUMNS)
    return {**row, "name": folder.name, "state": UNREADABLE, "error": str(error)}


def _part(record: Mapping[str, Any], key: str, folder: RunFolder) -> Mapping[str, Any]:
    """The values below a key of a record; none if it has none."""
    value = record.get(key)
    if value is not None and not isinstance(value, dict):
        raise FedlensError(f"{folder.path} has damaged records: '{key}' is {value!r}.")
    return value or {}


def _checked(folder: RunFolder, row: Row) -> Row:
    """The row itself, if its numbers are numbers."""
    for key in (*INTEGERS, *REALS):
        value = row[key]
        fits = isinstance(value, int if key in INTEGERS else int | float)
        if value is not None and (not fits or isinstance(value, bool) or not math.isfinite(value)):
            raise FedlensError(f"{folder.path} has damaged records: '{key}' is {value!r}.")
    return row


def _metrics_rows(folder: RunFolder) -> Iterator[Row]:
    records = folder.journal("metrics").read()
    if not records:  # it has just begun, or never did
        return
    row = run_row(folder)
    if row["state"] == UNREADABLE:
        raise FedlensError(f"The metrics of {folder.name} cannot be read: {row['error']}")
    identity = {key: row[key] for key in IDENTITY}
    tested = {record.get("unit"): record for record in folder.journal("test_curve").read()}
    for record in records:
        unit = next((key for key in ("epoch", "round") if key in record), None)
        if unit is None or type(record[unit]) is not int:
            path = folder.journal("metrics").path
            raise FedlensError(f"{path} has a line without the number of its epoch or round.")
        number = record[unit]
        curve = {"test_curve": {k: v for k, v in tested.get(number, {}).items() if k != "unit"}}
        values = {key: value for key, value in record.items() if key != unit}
        scalars = dict(_scalars({**values, **curve}))
        taken = {*IDENTITY, "unit", "round"}
        yield {
            **identity,
            "unit": unit,
            "round": number,
            **{f"metric_{key}" if key in taken else key: scalars[key] for key in scalars},
        }


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("validation_top1", 0.5) and so on, without lists."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}_")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def _typed(table: "pandas.DataFrame") -> "pandas.DataFrame":
    """Whole numbers stay whole where some are missing."""
    kinds: dict[str, Any] = {
        **dict.fromkeys(INTEGERS, "Int64"),
        **dict.fromkeys(REALS, "float64"),
    }
    return table.astype({key: kind for key, kind in kinds.items() if key in table.columns})


def _kind(rows: Sequence[Row], key: str) -> str:
    """The type of a column: whole numbers, numbers, or anything."""
    kinds = {type(row[key]) for row in rows if row.get(key) is not None}
    if kinds == {int}:
        return "Int64"
    return "float64" if kinds <= {int, float} else "object"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; lists become tuples, so that a column can be grouped by."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", tuple(value) if isinstance(value, list) else value


def _differing(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all configs; a key may be missing in some."""
    configs = list(configs)
    return [
        key
        for key in sorted({key for config in configs for key in config})
        if len({json.dumps(config.get(key), default=str) for config in configs}) > 1
    ]
