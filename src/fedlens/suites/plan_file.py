"""The plan of a budgeted study, kept beside its runs: which runs, at which level, in how much time.

The same command finds the same file. While its runs are unfinished and time is left, they are
resumed; after that, the next budget continues at the same level with what was left out.
"""

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedlens import yaml_reader
from fedlens.errors import FedlensError
from fedlens.files import replacing
from fedlens.runtime.units import duration_text
from fedlens.suites.budget_rules import Level, parse_level
from fedlens.suites.suite import Cell

FOLDER = "plans"


@dataclass(frozen=True)
class Request:
    """What a command asks for, apart from its budget."""

    suite: str
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seeds: int | None = None

    def path(self, root: Path) -> Path:
        """Its plan, beside the runs; one for each request."""
        text = json.dumps([asdict(self)], sort_keys=True)
        name = re.sub(r"\W+", "_", Path(self.suite).stem)
        return root / FOLDER / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"


@dataclass(frozen=True)
class StoredPlan:
    """Runs are named by "label, seed N", in the order in which they are carried out."""

    level: Level
    seconds: float  # of the budget
    runs: tuple[str, ...]
    left_out: tuple[str, ...]
    used_seconds: float = 0.0  # so far, over all commands that carried it out

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.seconds - self.used_seconds)

    def used(self, seconds: float) -> "StoredPlan":
        return replace(self, used_seconds=seconds)

    def write(self, path: Path, request: Request) -> None:
        content = {
            "suite": request.suite,
            "overrides": list(request.overrides),
            "only": list(request.only),
            "level": self.level.plain(),
            "budget": duration_text(self.seconds),
            "budget_seconds": self.seconds,
            "used_seconds": round(self.used_seconds, 1),
            "runs": list(self.runs),
            "left_out": list(self.left_out),
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
        with replacing(path) as temporary:
            temporary.write_text(f"# A plan of `fedlens suite --budget`.\n{text}", encoding="utf-8")


def read(path: Path) -> StoredPlan | None:
    """None where there is none; refuses a damaged file."""
    if not path.exists():
        return None
    try:
        content = yaml_reader.read(path)
        seconds, used = (float(content[key]) for key in ("budget_seconds", "used_seconds"))
        runs, left_out = (_names(content[key]) for key in ("runs", "left_out"))
        if not (0 < seconds < float("inf") and 0 <= used < float("inf")):
            raise ValueError(seconds, used)
        return StoredPlan(parse_level(content["level"]), seconds, runs, left_out, used)
    except (ValueError, KeyError, TypeError, FedlensError) as error:
        raise FedlensError(
            f"The plan {path} is damaged: delete it to plan again; finished runs are kept."
        ) from error


def named(cell: Cell) -> str:
    return f"{cell.label}, seed {cell.config.seed}"


def checked(names: Sequence[str], known: Collection[str], path: Path) -> Sequence[str]:
    """The names of a plan's runs; refuses a plan of a suite that has changed since."""
    if missing := [name for name in names if name not in known]:
        raise FedlensError(
            f"The suite has changed since {path} was made ('{missing[0]}' is no longer part of "
            "it): delete that file to plan again; finished runs are kept."
        )
    return names


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return tuple(value)
