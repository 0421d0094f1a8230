"""A search space: a range or a list of values for each of some config keys. No torch.

`log:1e-4:1`, `float:0:0.1` and `int:1:8` are ranges, `cosine,linear` is a list. A space is checked
before the first trial.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fedlens.config import compose
from fedlens.config.schema import ROW_KEYS, RUNTIME_KEYS, Config, keys, row_key
from fedlens.errors import FedlensError, suggest
from fedlens.registry import REGISTRIES
from fedlens.training.schedules import SHAPES

DEFAULT = {
    "train.lr": "log:1e-4:1",
    "train.optimizer.weight_decay": "log:1e-6:1e-2",
    "train.schedule.name": ",".join(SHAPES),
}
RANGES = {"log": float, "float": float, "int": int}
# The measurement must not change between trials, and a lucky seed is not a better setting.
NOT_SEARCHABLE = (*RUNTIME_KEYS, "experiment", "seed", "data", "evaluate")


@dataclass(frozen=True)
class Dimension:
    key: str
    kind: str  # log | float | int | choices
    values: tuple[Any, ...]  # the ends of a range, or all choices

    def __str__(self) -> str:
        words = [compose.word(value) for value in self.values]
        return ",".join(words) if self.kind == "choices" else ":".join([self.kind, *words])

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, "values": list(self.values), "text": str(self)}

    def probes(self) -> list[Any]:
        """Representative values to check: every choice, or both ends and the middle."""
        if self.kind == "choices":
            return list(self.values)
        low, high = self.values
        middle = math.sqrt(low * high) if self.kind == "log" else (low + high) / 2
        return [low, RANGES[self.kind](middle), high]


def space(config: Config, overrides: Sequence[str], searched: Sequence[str]) -> list[Dimension]:
    """The dimensions `searched` (KEY=SPACE) and the default ones, without keys in `overrides`.

    Sorted by key, so that the order of the arguments does not matter.
    """
    fixed = {override.partition("=")[0] for override in overrides}
    texts = {
        key: text for key, text in DEFAULT.items() if key not in fixed and _is_read(config, key)
    }
    for word in searched:
        key, _, text = word.partition("=")
        if key in fixed:
            raise FedlensError(f"{key} is both fixed and searched: leave one of the two out.")
        texts[key] = text
    if not texts:
        raise FedlensError("Nothing is left to search: name a key with --search KEY=SPACE.")
    dimensions = [dimension(key, texts[key]) for key in sorted(texts)]
    for one in dimensions:
        for value in one.probes():
            try:
                compose.changed(config, {one.key: value})
            except FedlensError as error:
                raise FedlensError(f"--search {one.key}={one}: {error}") from error
    return dimensions


def dimension(key: str, text: str) -> Dimension:
    """The dimension of one key, if the key can be searched and the text is valid."""
    known = list(keys())
    if key not in known:
        raise FedlensError(f"Unknown config key '{key}': {suggest(key, known)}")
    if any(key == other or key.startswith(f"{other}.") for other in NOT_SEARCHABLE):
        raise FedlensError(f"{key} is not a training setting, so it cannot be searched.")
    if key not in ROW_KEYS and any(other.startswith(f"{key}.") for other in known):
        raise FedlensError(
            f"{key} is a group of keys: search one of them, such as {_first(known, key)}."
        )
    kind, *ends = text.split(":")
    if kind in RANGES:
        return Dimension(key, kind, _range(key, text, kind, ends))
    values = tuple(dict.fromkeys(_value(key, one) for one in text.split(",")))
    if len(values) < 2:
        raise FedlensError(
            f"--search {key}={text} is not a valid search space: write log:LOW:HIGH, "
            "float:LOW:HIGH, int:LOW:HIGH, or two or more values separated by commas."
        )
    return Dimension(key, "choices", values)


def _is_read(config: Config, key: str) -> bool:
    """Whether the chosen row has the parameter; other keys are always read."""
    row = row_key(key)
    if row is None:
        return True
    settings = compose.getattr_dotted(config, row)
    parameters = REGISTRIES[ROW_KEYS[row]][settings.name].parameters
    return key.removeprefix(f"{row}.") in {one.name for one in parameters}


def _range(key: str, text: str, kind: str, ends: list[str]) -> tuple[Any, Any]:
    try:
        low, high = (RANGES[kind](end) for end in ends)
        finite = math.isfinite(low) and math.isfinite(high)
    except (ValueError, OverflowError) as error:
        raise FedlensError(
            f"--search {key}={text}: write a range as {kind}:LOW:HIGH, with two numbers."
        ) from error
    if not (low < high and finite):
        raise FedlensError(f"--search {key}={text}: the first number must be below the second.")
    if kind == "log" and low <= 0:
        raise FedlensError(f"--search {key}={text}: a logarithmic range must start above 0.")
    return low, high


def _value(key: str, text: str) -> Any:
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        value = {}
    if isinstance(value, list | dict):
        raise FedlensError(f"--search {key}: '{text}' is not a value.")
    return value


def _first(known: list[str], group: str) -> str:
    return next(key for key in known if key.startswith(f"{group}."))
