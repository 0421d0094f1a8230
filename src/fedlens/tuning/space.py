"""Where a search looks: a range or a list of values for each of some config keys. No torch.

`log:1e-4:1`, `float:0:0.1` and `int:1:8` are ranges, `cosine,linear` a list. All of it is checked
before anything loads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fedlens.config import compose
from fedlens.config.schema import CIRCUMSTANCES, Config, keys
from fedlens.errors import FedlensError, suggest
from fedlens.training.schedules import SHAPES

DEFAULT = {
    "train.lr": "log:1e-4:1",
    "train.weight_decay": "log:1e-6:1e-2",
    "train.schedule.name": ",".join(SHAPES),
}
RANGES = {"log": float, "float": float, "int": int}
# What is measured must stay the same, and a lucky seed is not a better setting.
UNSEARCHED = (*CIRCUMSTANCES, "experiment", "seed", "data", "evaluate")


@dataclass(frozen=True)
class Dimension:
    key: str
    kind: str  # log | float | int | choices
    values: tuple[Any, ...]  # the two ends of a range, or all choices

    def __str__(self) -> str:
        words = [compose.word(value) for value in self.values]
        return ",".join(words) if self.kind == "choices" else ":".join([self.kind, *words])

    def told(self) -> dict[str, Any]:
        """For records."""
        return {"kind": self.kind, "values": list(self.values), "text": str(self)}

    def probes(self) -> list[Any]:
        """Values that stand for all: every choice, or both ends and the middle."""
        if self.kind == "choices":
            return list(self.values)
        low, high = self.values
        middle = math.sqrt(low * high) if self.kind == "log" else (low + high) / 2
        return [low, RANGES[self.kind](middle), high]


def space(config: Config, overrides: Sequence[str], asked: Sequence[str]) -> list[Dimension]:
    """What was asked for with KEY=SPACE and the default space, but for keys that `overrides` fix.

    In the order of the keys, so that it does not matter how it was written.
    """
    fixed = {override.partition("=")[0] for override in overrides}
    words = {key: text for key, text in DEFAULT.items() if key not in fixed}
    for told in asked:
        key, _, text = told.partition("=")
        if key in fixed:
            raise FedlensError(f"{key} is both fixed and searched: leave one of the two out.")
        words[key] = text
    if not words:
        raise FedlensError("Nothing is left to search: name a key with --search KEY=SPACE.")
    found = [dimension(key, words[key]) for key in sorted(words)]
    for one in found:
        for value in one.probes():
            try:
                compose.changed(config, {one.key: value})
            except FedlensError as error:
                raise FedlensError(f"--search {one.key}={one}: {error}") from error
    return found


def dimension(key: str, text: str) -> Dimension:
    """Of a key that may be searched, from its text."""
    known = list(keys())
    if key not in known:
        raise FedlensError(f"Unknown config key '{key}': {suggest(key, known)}")
    if any(key == other or key.startswith(f"{other}.") for other in UNSEARCHED):
        raise FedlensError(f"{key} is not searched: it does not say how to learn.")
    if any(other.startswith(f"{key}.") for other in known):
        raise FedlensError(f"{key} is a group: search keys of it, such as {_first(known, key)}.")
    kind, *ends = text.split(":")
    if kind in RANGES:
        return Dimension(key, kind, _range(key, text, kind, ends))
    values = tuple(dict.fromkeys(_value(key, one) for one in text.split(",")))
    if len(values) < 2:
        raise FedlensError(
            f"--search {key}={text} is no space: write log:LOW:HIGH, float:LOW:HIGH, int:LOW:HIGH "
            "or two values and more, with commas."
        )
    return Dimension(key, "choices", values)


def _range(key: str, text: str, kind: str, ends: list[str]) -> tuple[Any, Any]:
    try:
        low, high = (RANGES[kind](end) for end in ends)
    except ValueError as error:
        raise FedlensError(
            f"--search {key}={text}: a range is {kind}:LOW:HIGH, with two numbers."
        ) from error
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        raise FedlensError(f"--search {key}={text}: the first number must be below the second.")
    if kind == "log" and low <= 0:
        raise FedlensError(f"--search {key}={text}: a logarithmic range begins above 0.")
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
