"""`fedlens arithmetic`: edit finished models with task vectors, choose on validation, test once."""

from typing import Annotated, Any

import typer

from fedlens.cli.analysis import Alphas, FigureFile, Round, Scales, answer, opened
from fedlens.cli.numbers import grid, pairs, whole_numbers
from fedlens.cli.shared import RUNS, Overrides, Root, RunName, out
from fedlens.config.checks import MERGES
from fedlens.errors import FedlensError, suggest
from fedlens.runtime.stop import StopRequest
from fedlens.store.analysis_records import Record, analysis_name, result_of, rounds_kept
from fedlens.store.run_folder import RunFolder, find_run

app = typer.Typer(
    help="Edit finished models with task vectors: scale, compose, merge, forget.",
    no_args_is_help=True,
)

METHODS = ("average", *MERGES)
BASES = ("pretrained", "ridge")


@app.command()
def alpha(
    which: RunName,
    overrides: Overrides = None,
    base: Annotated[
        str, typer.Option(help="pretrained, ridge, or another run of the same model.")
    ] = "pretrained",
    alphas: Alphas = "0:2:0.1",
    figure: FigureFile = None,
    root: Root = RUNS,
) -> None:
    """W_base + α(W_run − W_base) over a grid of α, chosen on validation, tested once.

    The base `pretrained` is what the run began from, its head as prepared.

    Example: `fedlens arithmetic alpha fedavg --base centralized --alphas 0:2:0.1`
    """
    folder, points = find_run(which, root), grid(alphas)
    other = None if base in BASES else find_run(base, root)
    told = {"base": base} if other is None else {"base": other.name, "of": _digest(other)}

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses.alpha import comparable, scale
        from fedlens.analyses.loaded_run import ridge_headed

        run = opened(folder, stop, overrides)
        start, remarks = run.start, {}
        if other:
            from_there = opened(other, stop, overrides)
            remarks = comparable(run, from_there)
            start = from_there.tuned
        elif base == "ridge":
            start = ridge_headed(run, stop)
        return scale(run, start, told["base"], name, points, **remarks)

    words = ("alpha", told["base"], _span(points))
    answer(folder, analysis_name(*words, **told, alphas=points), compute, figure)


@app.command()
def compose(
    terms: Annotated[
        list[str], typer.Argument(metavar="RUN=COEF...", help="Runs and their coefficients.")
    ],
    alphas: Alphas = "0:2:0.1",
    figure: FigureFile = None,
    root: Root = RUNS,
) -> None:
    """θ + α Σ c τ: what several runs learned, added, negated, scaled; measured as the first run is.

    Example: `fedlens arithmetic compose first=1 second=-0.5`
    """
    named = [(find_run(word, root), factor) for word, factor in pairs(terms, "RUN=COEF")]
    coefficients = {folder.name: factor for folder, factor in named}
    if len(coefficients) < len(named):
        raise FedlensError("A run is named twice: give each one coefficient.")
    first, points = named[0][0], grid(alphas)
    digests = {folder.name: _digest(folder) for folder, _ in named}

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import alpha

        runs = {folder.name: opened(folder, stop) for folder, _ in named}
        return alpha.compose(runs[first.name], runs, coefficients, name, points)

    words = [f"{factor:g}_{name}" for name, factor in coefficients.items()]
    name = analysis_name("compose", *words, terms=coefficients, of=digests, alphas=points)
    answer(first, name, compute, figure)


@app.command()
def merge(
    which: Annotated[
        str | None, typer.Argument(metavar="RUN", help="One with federated.keep_updates.")
    ] = None,
    overrides: Overrides = None,
    method: Annotated[
        list[str] | None, typer.Option(help="One of the methods, or several; else all.")
    ] = None,
    scales: Scales = "0.1,0.3,1,2",
    density: Annotated[
        float, typer.Option(help="The share of entries kept: TIES, DARE, Breadcrumbs.")
    ] = 0.2,
    outliers: Annotated[
        float, typer.Option(help="The share of the largest cut off: Breadcrumbs.")
    ] = 0.01,
    agreement: Annotated[int, typer.Option(help="Clients an entry needs: consensus.")] = 2,
    threshold: Annotated[float, typer.Option(help="When a client counts: consensus.")] = 0.1,
    number: Round = None,
    figure: FigureFile = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the methods and their papers.")
    ] = False,
    root: Root = RUNS,
) -> None:
    """Merge the client updates of a round anew, by every method, and test the best of them.

    Task arithmetic sums where the others average: with ten clients its λ = 0.1 is the average's 1.

    Example: `fedlens arithmetic merge fedavg --method ties --method dare --scales 0.5,1,2`
    """
    if list_all:
        from fedlens.arithmetic.merging import TABLE
        from fedlens.reporting.terminal.analyses import methods_table

        out.print(methods_table({name: (row.about, row.paper) for name, row in TABLE.items()}))
        return
    if which is None:
        raise FedlensError("Merging needs a RUN, or --list.")
    methods = list(dict.fromkeys(method or METHODS))
    if unknown := [name for name in methods if name not in METHODS]:
        raise FedlensError(
            f"The merging method {unknown[0]} is unknown: {suggest(unknown[0], METHODS)}"
        )
    folder, points = find_run(which, root), grid(scales)
    rounds_kept(folder)
    kept: dict[str, Any] = {
        "density": density,
        "outliers": outliers,
        "agreement": agreement,
        "threshold": threshold,
    }

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import client_algebra
        from fedlens.arithmetic.merging import MergeSettings

        settings = MergeSettings(**kept)
        run = opened(folder, stop, overrides)
        return client_algebra.merge(run, name, methods, points, settings, number)

    said = "all" if len(methods) == len(METHODS) else "+".join(methods)
    asked = {"methods": methods, "scales": points, "round": number, **kept}
    answer(folder, analysis_name("merge", said, *_of_round(number), **asked), compute, figure)


@app.command()
def clients(
    which: RunName,
    overrides: Overrides = None,
    drop: Annotated[str | None, typer.Option(help="Clients to leave out: `3,7`.")] = None,
    negate: Annotated[str | None, typer.Option(help="Clients to subtract: `5`.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(help="A client and its factor: `2=0.5`.")
    ] = None,
    figure: FigureFile = None,
    root: Root = RUNS,
) -> None:
    """Drop, negate or re-weight clients in the rounds whose updates were kept.

    Target accuracy is of the classes these clients hold, control accuracy of all others.

    Example: `fedlens arithmetic clients fedavg --drop 3,7 --weight 2=0.5`
    """
    folder = find_run(which, root)
    rounds_kept(folder)
    dropped, negated = whole_numbers(drop, "--drop"), whole_numbers(negate, "--negate")
    factors = pairs(weight or [], "CLIENT=FACTOR")
    weights = {whole_numbers(word, "--weight")[0]: factor for word, factor in factors}
    if len(weights) < len(factors):
        raise FedlensError("--weight names a client twice: give each one factor.")

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses.client_algebra import contributions, recombine
        from fedlens.arithmetic.forgetting import coefficients

        run = opened(folder, stop, overrides)
        told = contributions(run)
        asked = coefficients(told.clients, drop=dropped, negate=negated, weights=weights)
        return recombine(run, name, asked, told)

    edits = {"drop": dropped, "negate": negated, "weight": list(weights)}
    words = [f"{edit}{'+'.join(map(str, who))}" for edit, who in edits.items() if who]
    asked = {"drop": sorted(dropped), "negate": sorted(negated), "weights": weights}
    answer(folder, analysis_name("clients", *words, **asked), compute, figure)


@app.command()
def forget(
    which: RunName,
    overrides: Overrides = None,
    label: Annotated[int | None, typer.Option("--class", help="The class to forget.")] = None,
    client: Annotated[int | None, typer.Option(help="The client to forget.")] = None,
    scales: Scales = "0:3:0.25",
    keep: Annotated[
        float, typer.Option(help="The share of control accuracy that must be left.")
    ] = 0.95,
    figure: FigureFile = None,
    root: Root = RUNS,
) -> None:
    """Subtract what a class or a client contributed, as far as all else allows; λ = 0 is included.

    Example: `fedlens arithmetic forget fedavg --class 3 --keep 0.95`
    """
    if (label is None) == (client is None):
        raise FedlensError("Say what to forget: either --class N or --client N.")
    if not 0 <= keep <= 1:
        raise FedlensError(f"--keep must lie in [0, 1], not {keep}: it is a share.")
    folder, points = find_run(which, root), sorted({0.0, *grid(scales)})
    rounds_kept(folder)

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import client_algebra

        run = opened(folder, stop, overrides)
        told = client_algebra.contributions(run)
        return client_algebra.forget(run, name, told, points, label=label, client=client, keep=keep)

    what = f"class{label}" if client is None else f"client{client}"
    asked = {"label": label, "client": client, "scales": points, "keep": keep}
    answer(folder, analysis_name("forget", what, **asked), compute, figure)


@app.command()
def interference(
    which: RunName,
    overrides: Overrides = None,
    pair: Annotated[
        str | None, typer.Option(help="Two clients, `3,7`; else the round's first two.")
    ] = None,
    alphas: Alphas = "0,0.5,1,1.5,2",
    number: Round = None,
    figure: FigureFile = None,
    root: Root = RUNS,
) -> None:
    """How clients of a round interfere: cosines, sign conflict, and what two do to each other.

    Measured on validation images alone.

    Example: `fedlens arithmetic interference fedavg --pair 3,7 --alphas 0:2:0.25`
    """
    folder, points = find_run(which, root), grid(alphas)
    rounds_kept(folder)
    both = whole_numbers(pair, "--pair")
    if both and len(both) != 2:
        raise FedlensError("--pair takes two different clients, such as 3,7.")

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import interference

        two = (both[0], both[1]) if both else None
        run = opened(folder, stop, overrides)
        return interference.interference(run, name, points, pair=two, number=number)

    words = [*(["+".join(map(str, both))] if both else []), *_of_round(number)]
    asked = {"pair": both, "alphas": points, "round": number}
    answer(folder, analysis_name("interference", *words, **asked), compute, figure)


def _digest(folder: RunFolder) -> str:
    """Which parameters another run brings: it may be made anew under its old name."""
    return str(result_of(folder)["choice"]["parameters"])


def _span(points: list[float]) -> str:
    return f"{points[0]:g}to{points[-1]:g}"


def _of_round(number: int | None) -> list[str]:
    return [] if number is None else [f"round{number}"]
