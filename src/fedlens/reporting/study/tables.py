"""Tables of a report as Markdown, CSV and LaTeX.

A mean is followed by half the width of its interval; numbers from one seed are marked, and so are
models that were tested before any training.
"""

import csv
import io
from collections.abc import Iterable, Sequence

from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Answer, Cell, Contrast, Grid
from fedlens.reporting.study.labels import NONE
from fedlens.reporting.study.statistics import SIGNIFICANCE

SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "×": r"$\times$", "−": r"$-$", "±": r"$\pm$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$",
    "→": r"$\to$", "∞": r"$\infty$", "√": r"$\surd$", "…": r"\dots{}", "²": r"$^2$", "₁": r"$_1$",
    "₂": r"$_2$", "\n": " ",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "η": "eta",
    "θ": "theta", "λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "varphi", "χ": "chi", "ω": "omega", "Δ": "Delta", "Σ": "Sigma", "Ω": "Omega",
}  # fmt: skip
ESCAPES = str.maketrans({**SPECIAL, **{letter: f"$\\{name}$" for letter, name in GREEK.items()}})

COLUMNS = (
    "table", "row", "column", "mean", "sample deviation", "half width", "seeds", "validation",
    "learning rate", "candidates", "untrained", "megabytes", "method", "runs",
)  # fmt: skip
DIFFERENCES = (
    "table", "row", "against", "column", "difference", "half width", "shared seeds", "p",
    "p corrected",
)  # fmt: skip
ASKED = (
    "question", "first", "second", "difference", "half width", "shared seeds", "effect", "p",
    "p corrected",
)  # fmt: skip


def value(cell: Cell, *, lr: bool = False) -> str:
    """'54.69 ± 0.42', '78.74 (1 seed)', '50.12 ± 0.31 †'; if `lr`, with the learning rate."""
    number = f"{cell.mean:.2f}" if cell.half is None else f"{cell.mean:.2f} ± {cell.half:.2f}"
    number += f" {captions.DAGGER}" if cell.untrained else ""
    notes = [
        *(["1 seed"] if cell.half is None else []),
        *([f"lr {cell.lr:g}"] if lr and cell.lr is not None else []),
    ]
    return f"{number} ({', '.join(notes)})" if notes else number


def contrast_value(contrast: Contrast | Answer) -> str:
    """'+1.20 ± 0.45 (p = 0.012)', '+0.10 ± 0.90 (p = 0.700, not significant)', …"""
    if contrast.mean is None:
        return captions.verdict(contrast)
    number = f"{contrast.mean:+.2f}".replace("-", "−")
    spread = "" if contrast.half is None else f" ± {contrast.half:.2f}"
    p, verdict = contrast.corrected, captions.verdict(contrast)
    notes = [
        *([] if p is None else [p_value(p)]),
        *([] if verdict in ("higher", "lower") else [verdict]),
    ]
    return f"{number}{spread} ({', '.join(notes)})"


def p_value(p: float) -> str:
    """'p = 0.012', 'p < 0.001'."""
    text = probability(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def probability(p: float | None) -> str:
    """Three decimals, or four if three would round it up to the limit of significance."""
    if p is None:
        return NONE
    decimals = 4 if p < SIGNIFICANCE <= round(p, 3) else 3
    return "< 0.001" if p < 0.001 else f"{p:.{decimals}f}"


def markdown(grid: Grid, family: str = captions.TABLE_FAMILY) -> str:
    """The accuracies, the number of seeds, and the differences if there are any.

    `family` says over what p-values are corrected.
    """
    rates = rates_differ(grid)
    lines = _markdown(
        [grid.corner, *grid.columns],
        [
            [row, *(NONE if cell is None else value(cell, lr=rates) for cell in cells)]
            for row, cells in zip(grid.rows, grid.cells, strict=True)
        ],
    )
    marked = any(cell.untrained for cell in captions.cells(grid))
    start = f" {captions.DAGGER} {captions.UNTRAINED}" if marked else ""
    lines += ["", f"n = {captions.seeds(grid)}.{start}"]
    if grid.contrasts:
        lines += ["", f"Differences over shared seeds; {family}:", ""]
        lines += _markdown(
            ["row", "minus", "column", "difference", "seeds"],
            [[c.row, c.against, c.column, contrast_value(c), str(c.count)] for c in grid.contrasts],
        )
    return "\n".join(lines) + "\n"


def asked(answers: Sequence[Answer]) -> str:
    """The contrasts that the suite stated before its runs."""
    lines = [captions.asked(answers), ""]
    lines += _markdown(
        ["question", "cells", "difference", "effect", "seeds"],
        [
            [one.question, f"{one.first} minus {one.second}", contrast_value(one), _effect(one),
             str(one.count)]
            for one in answers
        ],
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def asked_csv(answers: Sequence[Answer]) -> str:
    """A line per contrast that the suite stated."""
    return _csv(
        ASKED,
        (
            (a.question, a.first, a.second, a.mean, a.half, a.count, a.effect, a.p, a.corrected)
            for a in answers
        ),
    )


def _effect(answer: Answer) -> str:
    return NONE if answer.effect is None else f"{answer.effect:+.1f}".replace("-", "−")


def to_csv(grid: Grid) -> str:
    """A line per cell that has a run."""
    return _csv(
        COLUMNS,
        (
            (
                grid.name, row, column, cell.mean, cell.deviation, cell.half, _joined(cell.seeds),
                cell.validation, cell.lr, cell.candidates, cell.untrained, cell.megabytes,
                cell.method, _joined(cell.runs),
            )
            for row, cells in zip(grid.rows, grid.cells, strict=True)
            for column, cell in zip(grid.columns, cells, strict=True)
            if cell is not None
        ),
    )  # fmt: skip


def contrasts_csv(grid: Grid) -> str:
    """A line per difference between two rows of a column, or two columns of a row."""
    return _csv(
        DIFFERENCES,
        (
            (grid.name, c.row, c.against, c.column, c.mean, c.half, c.count, c.p, c.corrected)
            for c in grid.contrasts
        ),
    )


def latex(grid: Grid) -> str:
    """A tabular alone, for booktabs; `latex_notes` has what its marks mean."""
    rates = rates_differ(grid)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(grid.columns)}}}",
            r"\toprule",
            _latex_row([escape(grid.corner), *map(escape, grid.columns)]),
            r"\midrule",
            *(
                _latex_row([escape(row), *(_latex_value(cell, rates) for cell in cells)])
                for row, cells in zip(grid.rows, grid.cells, strict=True)
            ),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def latex_notes(grid: Grid) -> str:
    """What the table's marks mean, to be printed below it; '' if it has none."""
    cells = captions.cells(grid)
    return " ".join([
        *([r"$^{1}$ One seed, no interval."] if any(c.half is None for c in cells) else []),
        *([rf"$^{{\dagger}}$ {captions.UNTRAINED}"] if any(c.untrained for c in cells) else []),
        *(["In parentheses: learning rate."] if rates_differ(grid) else []),
    ])  # fmt: skip


def escape(text: str) -> str:
    """LaTeX that prints the text."""
    return text.translate(ESCAPES)


def rates_differ(grid: Grid) -> bool:
    """Whether the table's cells were trained at more than one learning rate."""
    return len({cell.lr for cell in captions.cells(grid)} - {None}) > 1


def _latex_value(cell: Cell | None, rates: bool) -> str:
    if cell is None:
        return "--"
    spread = "" if cell.half is None else rf" \pm {cell.half:.2f}"
    marks = ("1" if cell.half is None else "") + (r"\dagger" if cell.untrained else "")
    spread += f"^{{{marks}}}" if marks else ""
    rate = rf" {{\scriptsize ({cell.lr:g})}}" if rates and cell.lr is not None else ""
    return f"${cell.mean:.2f}{spread}${rate}"


def _latex_row(words: Iterable[str]) -> str:
    return " & ".join(words) + r" \\"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [_markdown_row(row) for row in (head, rule, *rows)]


def _markdown_row(words: Iterable[str]) -> str:
    return "| " + " | ".join(word.replace("|", r"\|") for word in words) + " |"


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_plain(entry) for entry in row] for row in rows)
    return stream.getvalue()


def _plain(entry: object) -> object:
    """Without digits that are only noise of binary fractions."""
    return f"{entry:.10g}" if isinstance(entry, float) else entry


def _joined(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
