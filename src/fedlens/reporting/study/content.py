"""The content of a report as plain data: the page, the paper, tables and figures are made from it.

`asdict` of it is JSON. Accuracies and their differences are in percent; a cell names the runs its
numbers come from, so that each can be checked.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


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
    abstract: str = ""  # printed before the generated one
    noniid: str = ""  # label of the skewed partition in the table of six models, such as Nc=1


@dataclass(frozen=True)
class Question:
    """A row of `registry.question`: how its tables are audited, drawn and described.

    All but `name` and `label` are traits of the row: `@question(label="…", figure="lines", …)`.
    """

    name: str
    label: str
    asks: str = ""  # the same as a question, above its answer; '': the label
    order: float = 100.0
    suite: str = ""  # the suite whose runs answer it
    headline: bool = False  # its first table stands in the overview
    audit: tuple[str, ...] = ("budget", "tuning")  # checks of its tables: density, budget, tuning
    figure: Literal["dots", "panels", "lines", "partitions"] = "dots"
    x: Literal["rows", "columns"] = "rows"  # of lines: labels that hold the x values
    x_label: str = ""
    x_base: int = 10  # of lines: the base of their logarithmic x axis
    panels: Literal["rows", "columns"] = "columns"  # of learning curves: a panel for each of these
    panels_over_steps: Literal["rows", "columns"] = "columns"  # the same over steps or bytes
    heatmap: bool = False  # colour the page's table instead of drawing a chart beside it


@dataclass(frozen=True)
class Cell:
    """Test accuracy of one method over its seeds."""

    mean: float
    deviation: float | None  # sample standard deviation; None for one seed
    half: float | None  # half the width of the 95 % interval; None for one seed
    validation: float | None  # mean
    seeds: list[int]
    method: str  # its label
    lr: float | None  # None if nothing is trained
    candidates: int  # methods it was chosen among, on validation; 1: there was no choice
    megabytes: float | None  # sent in a run, both ways
    runs: list[str]
    untrained: int = 0  # seeds whose best parameters on validation were those before training


@dataclass(frozen=True)
class Contrast:
    """A row minus a reference row over the seeds they share, within a column.

    If `turned`, a column minus a reference column, within a row.
    """

    row: str
    against: str
    column: str
    mean: float
    half: float | None
    count: int
    p: float | None
    corrected: float | None  # p by Holm's method over the table's contrasts of this kind, or over
    # those that the suite states; None where the suite does not state this one
    turned: bool = False  # `row` and `against` are columns of the table, `column` is a row

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Row and column of the cell that is compared, and of its reference."""
        if self.turned:
            return (self.column, self.row), (self.column, self.against)
        return (self.row, self.column), (self.against, self.column)


@dataclass(frozen=True)
class Answer:
    """A contrast that the suite stated before its runs: its first cell minus its second."""

    question: str
    first: str  # labels of the cells in the suite
    second: str
    mean: float | None  # None: the cells share no seed yet
    half: float | None
    count: int
    effect: float | None  # the mean in standard deviations of the differences between seeds
    p: float | None
    corrected: float | None  # p by Holm's method over all contrasts of the suite
    runs: list[list[str]]  # of each cell


@dataclass(frozen=True)
class Grid:
    """A table of accuracies; `cells[row][column]` is None if there is no run."""

    name: str  # of its files, unique in a report
    question: str  # name of the question that it answers
    title: str
    note: str  # what all its methods share
    corner: str  # what the rows are
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell | None]]
    contrasts: list[Contrast] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)  # rows that figures draw as lines of reference


@dataclass(frozen=True)
class Curve:
    """Averages over seeds, by epoch or round; every list is as long as `unit`, or empty."""

    label: str
    runs: list[str]
    unit: list[int]  # epochs or rounds after which validation was measured
    steps: list[int]  # so far, of a client or of central training
    megabytes: list[float]  # sent so far; empty for central training
    mean: list[float]  # validation accuracy
    half: list[float | None]


@dataclass(frozen=True)
class Observation:
    """How far clients' updates agree, round by round, averaged over seeds."""

    label: str
    runs: list[str]
    round: list[int]
    drift: list[float | None]
    cosine: list[float | None]
    sign_agreement: list[float | None]


@dataclass(frozen=True)
class CurveSet:
    """Curves of one table's cells."""

    name: str
    question: str
    title: str
    unit: str  # epoch | round
    curves: list[Curve]
    observations: list[Observation]


@dataclass(frozen=True)
class MaskMap:
    """Density by layer and kind, of one run's mask; None if a layer has no such weights."""

    name: str
    rule: str
    label: str
    trained: int
    total: int
    layers: list[str]
    kinds: list[str]
    density: list[list[float | None]]
    run: str


@dataclass(frozen=True)
class AlphaCurve:
    """W_base + α(W_run − W_base): validation over α, and one test at the chosen α."""

    name: str
    label: str
    base: str
    alphas: list[float]
    accuracy: list[float]  # validation
    loss: list[float]
    chosen: float
    test: float  # accuracy at the chosen α
    as_trained: float  # test accuracy of the run itself, α = 1
    barrier: float | None
    run: str


@dataclass(frozen=True)
class Finding:
    """Another analysis of a run: its settings and results."""

    name: str
    kind: str  # merge | clients | forget | interference | compose
    label: str
    facts: list[tuple[str, str]]
    run: str
    record: dict[str, Any]  # as it is in the run's folder, for figures


@dataclass(frozen=True)
class PartitionPicture:
    """The classes that each client holds."""

    name: str
    label: str
    clients: int
    samples: int
    summary: dict[str, dict[str, float]]
    histogram: list[list[int]]  # clients × classes; empty if there are too many clients
    run: str


@dataclass(frozen=True)
class Chapter:
    """One setting; numbers are never compared across settings."""

    setting: str
    headline: Grid | None  # the table in the overview
    grids: list[Grid]
    curves: list[CurveSet]
    masks: list[MaskMap]
    alphas: list[AlphaCurve]
    findings: list[Finding]
    partitions: list[PartitionPicture]
    facts: dict[str, list[Any]]  # values of some config keys over all runs: clients, batch size…


@dataclass(frozen=True)
class Check:
    """One check of the audit: what was checked, and everything that is wrong."""

    title: str
    scope: str  # how many of what were checked
    violations: list[str]
    remarks: list[str]  # information, not errors
    nothing: str = ""  # instead of PASS where nothing was checked: 'nothing to check', 'not tuned'

    @property
    def passed(self) -> bool:
        return not self.violations

    @property
    def outcome(self) -> str:
        """'PASS', 'FAIL', or why there was nothing to check."""
        return "FAIL" if self.violations else self.nothing or "PASS"


@dataclass(frozen=True)
class Provenance:
    """Where a run's numbers come from; without times, which differ between equal runs."""

    name: str
    setting: str
    seed: int
    command: str
    commit: str
    versions: dict[str, str]
    device: str
    threads: int
    inputs: dict[str, str | None]
    parameters: str  # hash of the parameters that were tested
    chosen: str  # by what, and which epoch or round
    validation: float | None
    test: float
    used: bool  # whether a table uses it


@dataclass(frozen=True)
class Content:
    about: About
    questions: list[Question]
    chapters: list[Chapter]
    audit: list[Check]
    runs: list[Provenance]
    unfinished: dict[str, str]  # run → state
    asked: list[Answer] = field(default_factory=list)  # what the suite asked before its runs

    def question(self, grid: Grid | CurveSet) -> Question:
        return next(one for one in self.questions if one.name == grid.question)
