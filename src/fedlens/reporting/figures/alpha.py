"""Accuracy and loss along a line of models, base + α(end − base), the chosen α marked."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlens.reporting.figures.style import (
    BLUE,
    GREY,
    LINE,
    ORANGE,
    TEXT,
    YELLOW,
    panels,
    plain,
    rounded,
)
from fedlens.reporting.study.content import AlphaCurve

SHORT = 20  # letters of a name that fits above its line


def alpha_curve_figure(curve: AlphaCurve) -> Figure:
    """A curve of a report, whose accuracies are in percent."""
    return along_figure(
        title=curve.label,
        alphas=curve.alphas,
        accuracy=[value / 100 for value in curve.accuracy],
        loss=curve.loss,
        chosen=curve.alphas.index(curve.chosen),
        test=curve.test / 100,
        base=curve.base,
        end="run",
        barrier=curve.barrier,
    )


def along_figure(
    *,
    title: str,
    alphas: Sequence[float],
    accuracy: Sequence[float],
    loss: Sequence[float],
    chosen: int,
    test: float,
    base: str,
    end: str,
    barrier: float | None,
) -> Figure:
    """Validation accuracy and loss over α, with the chosen α, its test accuracy and the barrier."""
    heading = textwrap.fill(title, 95)
    top = 0.3 + LINE * (heading.count("\n") + 1)
    figure, [[left, right]] = panels(
        1, 2, width=TEXT, height=1.55, left=0.55, right=0.3, across=0.65, top=top, bottom=0.4 + LINE
    )
    figure.suptitle(heading, y=1 - 0.04 / figure.get_figheight(), va="top")
    left.plot(alphas, accuracy, color=BLUE, marker="o", label="validation")
    mark_choice(left, alphas[chosen], accuracy[chosen], test, f"α = {alphas[chosen]:g}")
    left.set_ylabel("accuracy [%]")
    left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}")
    right.plot(alphas, loss, color=BLUE, marker="o", label="validation")
    right.set_ylabel("loss")
    if barrier is not None:
        _chord(right, alphas, loss, barrier)
    for axes in (left, right):
        _ends(axes, alphas, base, end)
        axes.set_xlabel("α")
        axes.margins(y=0.1)
        axes.yaxis.set_major_locator(rounded(5))
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2,
            handletextpad=0.5,
        )  # fmt: skip
        plain(axes, "y")
    return figure


def mark_choice(axes: Axes, at: float, accuracy: float, test: float, label: str) -> None:
    """A ring around the chosen candidate, and a star for its test accuracy."""
    axes.plot(
        at, accuracy, marker="o", markersize=9, markerfacecolor="none", markeredgecolor=GREY,
        markeredgewidth=1.2, linestyle="none", zorder=4, label=f"chosen: {label}",
    )  # fmt: skip
    axes.plot(
        at, test, color=YELLOW, marker="*", markersize=9, markeredgecolor="black",
        markeredgewidth=0.7, linestyle="none", zorder=5, label=f"test: {test:.1%}",
    )  # fmt: skip


def _ends(axes: Axes, alphas: Sequence[float], base: str, end: str) -> None:
    """Labels the two models that the line connects."""
    names = {0.0: base if len(base) <= SHORT else "base", 1.0: end}
    for alpha, name in names.items():
        if alpha in alphas:
            axes.axvline(alpha, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
            axes.text(
                alpha, 1.01, name, transform=axes.get_xaxis_transform(), color=GREY,
                ha="center", va="bottom", fontsize="small",
            )  # fmt: skip


def _chord(axes: Axes, alphas: Sequence[float], loss: Sequence[float], barrier: float) -> None:
    """The chord between both ends, and the barrier: the highest rise of the loss above it."""
    at = dict(zip(alphas, loss, strict=True))
    between = {a: (1 - a) * at[0.0] + a * at[1.0] for a in alphas if 0 <= a <= 1}
    top = max(between, key=lambda a: at[a] - between[a])
    axes.plot([0, 1], [at[0.0], at[1.0]], color=GREY, linestyle="--", label="chord")
    axes.plot(
        [top, top], [between[top], at[top]], color=ORANGE, linewidth=3, solid_capstyle="butt",
        label=f"barrier: {barrier:.3g}",
    )  # fmt: skip
