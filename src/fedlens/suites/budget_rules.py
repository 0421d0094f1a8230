"""What a suite states about budgets: levels to cut it down to, its headline, its priorities.

`budget:` in a suite's YAML is a duration, or {time, headline, priority, levels}. Headline and
priority are texts that match runs, as those of --only do.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fedlens.errors import FedlensError
from fedlens.runtime.units import parse_duration

AS_IS = "as the suite sets"


@dataclass(frozen=True)
class Level:
    """A limit for all runs; a run that is below it anyway keeps its own setting."""

    resolution: int | None = None  # in px, at most; None: as the suite sets
    steps: Fraction = Fraction(1)  # of all training steps
    batch: Fraction = Fraction(1)  # of the batch size
    evaluations: int | None = None  # of a run, at most

    @property
    def text(self) -> str:
        """What it changes, in words."""
        parts = [
            f"resolution ≤ {self.resolution}" if self.resolution else "",
            f"steps × {self.steps}" if self.steps != 1 else "",
            f"batch × {self.batch}" if self.batch != 1 else "",
            f"evaluations ≤ {self.evaluations}" if self.evaluations else "",
        ]
        return ", ".join(filter(None, parts)) or AS_IS

    def plain(self) -> dict[str, int | str]:
        """What it changes, as a suite's YAML states it."""
        shares = {"steps": self.steps, "batch": self.batch}
        limits = {"resolution": self.resolution, "evaluations": self.evaluations}
        return {
            **{key: value for key, value in limits.items() if value is not None},
            **{key: str(share) for key, share in shares.items() if share != 1},
        }


def _levels() -> tuple[Level, ...]:
    rows: list[tuple[int | None, str, str, int | None]] = [
        (None, "1", "1", None),
        (None, "1/2", "1", 10),
        (None, "1/4", "1", 8),
        (160, "1/4", "1", 6),
        (112, "1/4", "1/2", 5),
        (112, "1/8", "1/2", 4),
        (96, "1/8", "1/4", 3),
        (64, "1/8", "1/4", 3),
        (64, "1/16", "1/4", 2),
        (64, "1/16", "1/8", 2),
        (64, "1/32", "1/8", 1),
    ]
    return tuple(Level(px, Fraction(steps), Fraction(batch), n) for px, steps, batch, n in rows)


LEVELS = _levels()  # of a suite that states none, best first


@dataclass(frozen=True)
class BudgetRules:
    """A suite that names no headline has its first section, or all runs of its only table."""

    time: float | None = None  # in seconds, unless the command line says it
    headline: tuple[str, ...] = ()  # runs that get three seeds before others get a second one
    priority: tuple[str, ...] = ()  # what runs first; what matches no text comes last
    levels: tuple[Level, ...] = LEVELS  # best first


def parse(content: Any) -> BudgetRules:
    """The rules of a suite's YAML; what it does not state has its default."""
    if isinstance(content, str):
        return BudgetRules(parse_duration(content))
    known = ("time", "headline", "priority", "levels")
    if not isinstance(content, dict) or not content.keys() <= set(known):
        raise FedlensError(f"it must be a duration such as 12h, or set {', '.join(known)}.")
    values: dict[str, Any] = {}
    if "time" in content:
        values["time"] = parse_duration(str(content["time"]))
    for key in ("headline", "priority"):
        texts = content.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise FedlensError(f"{key} must be a list of sections, rows or columns.")
        values[key] = tuple(texts)
    if "levels" in content:
        values["levels"] = _parse_levels(content["levels"])
    return BudgetRules(**values)


def _parse_levels(content: Any) -> tuple[Level, ...]:
    if not isinstance(content, list) or not content:
        raise FedlensError("levels must be a list, best first, such as [{}, {steps: 1/2}].")
    return tuple(parse_level(one) for one in content)


def parse_level(content: Any) -> Level:
    """The inverse of `Level.plain`."""
    known = {"resolution", "steps", "batch", "evaluations"}
    if not isinstance(content, dict) or not content.keys() <= known:
        raise FedlensError(f"a level sets some of {', '.join(sorted(known))}, not {content}.")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in ("steps", "batch"):
            values[key] = _share(key, value)
        elif type(value) is not int or value < 1:
            raise FedlensError(f"{key} of a level must be a positive integer, not {value}.")
        else:
            values[key] = value
    return Level(**values)


def _share(key: str, value: Any) -> Fraction:
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise FedlensError(f"{key} of a level must be a share such as 1/4, not {value}.")
    return share
