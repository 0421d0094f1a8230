"""What a report says, as plain data: every page, table and figure is drawn from this and no more.

`asdict` of it is JSON. Accuracies and their differences are in percent; a cell names the runs its
numbers come from, so that each can be checked.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Author:
    name: str
    id: str = ""
    affiliation: str = ""


@dataclass(frozen=True)
class About:
    """From the user's YAML file."""

    title: str = "Federated learning under the lens of task arithmetic"
    authors: list[Author] = field(default_factory=list)
    date: str = ""
    abstract: str = ""  # put before the generated one
    noniid: str = ""  # which partition stands for 'non-IID' among the six models, such as Nc=1


@dataclass(frozen=True)
class Cell:
    """Test accuracy of one method over its seeds."""

    mean: float
    deviation: float | None  # of the sample; None for one seed
    half: float | None  # of the 95 % interval's width; None for one seed
    validation: float | None  # mean
    seeds: list[int]
    method: str  # in words
    lr: float | None  # None where nothing is trained
    candidates: int  # methods it was chosen among, on validation; 1: there was no choice
    megabytes: float | None  # sent in a run, both ways
    runs: list[str]
    untrained: int = 0  # seeds whose best round or epoch was the start: what met the test split


@dataclass(frozen=True)
class Contrast:
    """A row minus another over the seeds they share, within a column; or turned, a column minus
    another within a row."""

    row: str
    against: str
    column: str
    mean: float
    half: float | None
    count: int
    p: float | None
    corrected: float | None  # by Holm's method over the table's contrasts of this kind
    turned: bool = False  # `row` and `against` are columns of the table, `column` is a row

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Row and column of the cell that is held against another, and of the other."""
        if self.turned:
            return (self.column, self.row), (self.column, self.against)
        return (self.row, self.column), (self.against, self.column)


@dataclass(frozen=True)
class Grid:
    """A table of accuracies; `cells[row][column]`, None where there is no run."""

    name: str  # of its files, unique in a report
    chapter: str
    title: str
    note: str  # what holds for the whole table
    corner: str  # what the rows are
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell | None]]
    contrasts: list[Contrast] = field(default_factory=list)


@dataclass(frozen=True)
class Curve:
    """Over epochs or rounds, averaged over seeds; every list is as long as `unit`, or empty."""

    label: str
    runs: list[str]
    unit: list[int]  # epochs or rounds, where validation was measured
    steps: list[int]  # of a client, or of central training, so far
    megabytes: list[float]  # sent so far; empty for central training
    mean: list[float]  # validation accuracy
    half: list[float | None]


@dataclass(frozen=True)
class Observation:
    """What clients did to each other, round by round, averaged over seeds."""

    label: str
    runs: list[str]
    round: list[int]
    drift: list[float | None]
    cosine: list[float | None]
    sign_agreement: list[float | None]


@dataclass(frozen=True)
class CurveSet:
    """Curves of one table's cells, to be seen together."""

    name: str
    chapter: str
    title: str
    unit: str  # epoch | round
    curves: list[Curve]
    observations: list[Observation]


@dataclass(frozen=True)
class MaskMap:
    """Density by layer and kind, of one run's mask; None where a layer has no such weights."""

    name: str
    label: str
    trained: int
    total: int
    layers: list[str]
    kinds: list[str]
    density: list[list[float | None]]
    run: str


@dataclass(frozen=True)
class AlphaCurve:
    """W_base + α(W_run − W_base): validation over α, and the one test of the α chosen."""

    name: str
    label: str
    base: str
    alphas: list[float]
    accuracy: list[float]  # validation
    loss: list[float]
    chosen: float
    test: float  # accuracy at the α chosen
    as_trained: float  # test accuracy at α = 1, the run's own
    barrier: float | None
    run: str


@dataclass(frozen=True)
class Finding:
    """Another analysis of a run: what was asked, and what came out, in words."""

    name: str
    kind: str  # merge | clients | forget | interference | compose
    label: str
    facts: list[tuple[str, str]]
    run: str
    record: dict[str, Any]  # as it is in the run's folder, for figures


@dataclass(frozen=True)
class PartitionPicture:
    """Who holds what: clients × classes where they are not many."""

    name: str
    label: str
    clients: int
    samples: int
    summary: dict[str, dict[str, float]]
    histogram: list[list[int]]  # empty where there are too many clients
    run: str


@dataclass(frozen=True)
class Chapter:
    """One setting: nothing in it is compared with another's numbers."""

    setting: str
    headline: Grid | None  # the six models
    grids: list[Grid]
    curves: list[CurveSet]
    masks: list[MaskMap]
    alphas: list[AlphaCurve]
    findings: list[Finding]
    partitions: list[PartitionPicture]
    facts: dict[str, list[Any]]  # what the configs hold: clients, batch size…; all values found


@dataclass(frozen=True)
class Check:
    """Of the audit: what was looked at, and everything found wrong."""

    title: str
    looked_at: str  # how many of what
    violations: list[str]
    remarks: list[str]  # worth knowing, not wrong

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class Provenance:
    """Where a run's numbers come from; nothing the clock said."""

    name: str
    setting: str
    seed: int
    command: str
    commit: str
    versions: dict[str, str]
    device: str
    threads: int
    inputs: dict[str, str | None]
    parameters: str  # the hash of what met the test split
    chosen: str  # on what, and which epoch or round
    validation: float | None
    test: float
    used: bool  # whether a number of the report comes from it


@dataclass(frozen=True)
class Content:
    about: About
    chapters: list[Chapter]
    audit: list[Check]
    runs: list[Provenance]
    unfinished: dict[str, str]  # run → state
