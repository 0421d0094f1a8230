"""`fedlens arithmetic`: edit trained models with task vectors, choose on validation, test once."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedlens.analyses.grids import grid
from fedlens.cli.analysis import Alphas, FigureFile, Round, Scales, compute_or_load, load_run
from fedlens.cli.numbers import assignment, integers, pairs
from fedlens.cli.shared import RUNS, Commands, Plugins, Root, RunName, RuntimeOverrides
from fedlens.errors import FedlensError, suggest
from fedlens.registry import merge_method
from fedlens.runtime.stop import StopRequest
from fedlens.store.analysis_records import (
    Record,
    analysis_name,
    require_kept_rounds,
    require_result,
)
from fedlens.store.run_folder import RunFolder, find_run

app = Commands(
    help="Edit trained models with task vectors: scale, compose, merge, forget.",
    no_args_is_help=True,
)

BASES = ("pretrained", "ridge")


@app.command()
def alpha(
    run: RunName,
    overrides: RuntimeOverrides = None,
    base: Annotated[
        str,
        typer.Option(
            help="The model at α = 0: `pretrained`, `ridge`, or another run with the same "
            "architecture."
        ),
    ] = "pretrained",
    alphas: Alphas = "0:2:0.1",
    figure: FigureFile = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Scale the task vector of a run: W_base + α(W_run − W_base) for several α.

    The best α on validation is tested once. With `--base pretrained`, α = 0 is the model that the
    run started from, with its fitted head. With `--base ridge`, it is that model with a ridge head.

    Example: `fedlens arithmetic alpha fedavg --base centralized --alphas 0:2:0.1`
    """
    folder, points = find_run(run, root), grid(alphas)
    other = None if base in BASES else find_run(base, root)
    settings = {"base": base} if other is None else {"base": other.name, "of": _digest(other)}

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses.alpha import check_comparable, sweep_alpha

        run = load_run(folder, stop, overrides)
        start, differences = run.start, {}
        if other:
            base_run = load_run(other, stop, overrides)
            differences = check_comparable(run, base_run)
            start = base_run.tuned
        elif base == "ridge":
            start = run.with_ridge_head()
        return sweep_alpha(run, start, settings["base"], name, points, **differences)

    words = ("alpha", settings["base"], _span(points))
    name = analysis_name(*words, **settings, alphas=points)
    compute_or_load(folder, name, compute, figure)


@app.command()
def compose(
    terms: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN=COEF...",
            help="Runs and their coefficients, such as `first=1 second=-0.5`.",
        ),
    ],
    alphas: Alphas = "0:2:0.1",
    figure: FigureFile = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Add or subtract task vectors of several runs: base + α · (sum of coefficient × task vector).

    The base, the head and the data are those of the first run. Several α are tried, and the best on
    validation is tested once.

    Example: `fedlens arithmetic compose first=1 second=-0.5`
    """
    named = [(find_run(word, root), factor) for word, factor in pairs(terms, "RUN=COEF")]
    coefficients = {folder.name: factor for folder, factor in named}
    if len(coefficients) < len(named):
        raise FedlensError("A run is named twice: name each run once.")
    first, points = named[0][0], grid(alphas)
    digests = {folder.name: _digest(folder) for folder, _ in named}

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import alpha

        runs = {folder.name: load_run(folder, stop) for folder, _ in named}
        return alpha.compose(runs[first.name], runs, coefficients, name, points)

    words = [f"{factor:g}_{name}" for name, factor in coefficients.items()]
    name = analysis_name("compose", *words, terms=coefficients, of=digests, alphas=points)
    compute_or_load(first, name, compute, figure)


@app.command()
def merge(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="A run that kept client updates (federated.keep_updates=1)."
        ),
    ] = None,
    overrides: RuntimeOverrides = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A merging method; repeatable. Default: all.")
    ] = None,
    scales: Scales = "0.1,0.3,1,2",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A parameter of the methods, `density=0.1`, or of one, `ties.density=0.1`; "
            "repeatable.",
        ),
    ] = None,
    number: Round = None,
    figure: FigureFile = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the methods, their parameters and papers.")
    ] = False,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Merge the client updates of one round by several methods, and test the best one.

    Task arithmetic sums the updates and most other methods average them: with ten clients, λ = 0.1
    of task arithmetic equals λ = 1 of the average. TSV-Merge and Iso-C sum matrices, unless you set
    `--parameter mean=true`. RegMean and the Fisher average use statistics of the clients' data,
    computed with the clients' models.

    Example: `fedlens arithmetic merge fedavg --method ties --method dare --scales 0.5,1,2`
    """
    if list_all:
        from fedlens.cli.commands.rows import print_rows

        print_rows("merge_method")
        return
    if run is None:
        raise FedlensError("Name a RUN to merge the updates of, or use --list.")
    methods = _merge_methods(method or merge_method.names, parameter or [])
    folder, points = find_run(run, root), grid(scales)
    require_kept_rounds(folder)

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import client_algebra

        run = load_run(folder, stop, overrides)
        return client_algebra.merge(run, name, methods, points, number)

    text = "all" if len(methods) == len(merge_method.names) else "+".join(methods)
    settings: dict[str, Any] = {"methods": methods, "scales": points, "round": number}
    outside = {name: row.plugin.word for name in methods
               if (row := merge_method[name]).plugin is not None}  # fmt: skip
    settings |= {"plugins": outside} if outside else {}
    name = analysis_name("merge", text, *_round_words(number), **settings)
    compute_or_load(folder, name, compute, figure)


@app.command()
def clients(
    run: RunName,
    overrides: RuntimeOverrides = None,
    drop: Annotated[str | None, typer.Option(help="Clients to leave out, such as `3,7`.")] = None,
    negate: Annotated[
        str | None, typer.Option(help="Clients whose updates to subtract, such as `5`.")
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="A client and the factor of its update, such as `2=0.5`; repeatable."),
    ] = None,
    figure: FigureFile = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Remove, subtract or re-weight clients in the rounds whose updates were kept.

    Target accuracy is on the classes that these clients hold, control accuracy on all others.

    Example: `fedlens arithmetic clients fedavg --drop 3,7 --weight 2=0.5`
    """
    folder = find_run(run, root)
    require_kept_rounds(folder)
    dropped, negated = integers(drop, "--drop"), integers(negate, "--negate")
    weighted = pairs(weight or [], "CLIENT=FACTOR")
    weights = {integers(word, "--weight")[0]: factor for word, factor in weighted}
    if len(weights) < len(weighted):
        raise FedlensError("--weight names a client twice: give each client one factor.")

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses.client_algebra import contributions, recombine
        from fedlens.arithmetic.forgetting import coefficients

        run = load_run(folder, stop, overrides)
        contributed = contributions(run)
        factors = coefficients(contributed.clients, drop=dropped, negate=negated, weights=weights)
        return recombine(run, name, factors, contributed)

    edits = {"drop": dropped, "negate": negated, "weight": list(weights)}
    words = [f"{edit}{'+'.join(map(str, who))}" for edit, who in edits.items() if who]
    settings = {"drop": sorted(dropped), "negate": sorted(negated), "weights": weights}
    compute_or_load(folder, analysis_name("clients", *words, **settings), compute, figure)


@app.command()
def forget(
    run: RunName,
    overrides: RuntimeOverrides = None,
    label: Annotated[
        int | None, typer.Option("--class", help="The number of the class to forget.")
    ] = None,
    client: Annotated[int | None, typer.Option(help="The number of the client to forget.")] = None,
    scales: Scales = "0:3:0.25",
    keep: Annotated[
        float, typer.Option(help="The fraction of the accuracy on other classes to keep.")
    ] = 0.95,
    figure: FigureFile = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Forget a class or a client: subtract λ times its contribution from the model.

    Of the values of λ that keep the accuracy on all other classes (`--keep`), the one that forgets
    most on validation images is evaluated on the test images. λ = 0, the trained model, is always
    tried.

    Example: `fedlens arithmetic forget fedavg --class 3 --keep 0.95`
    """
    if (label is None) == (client is None):
        raise FedlensError("Choose what to forget: either --class N or --client N.")
    if not 0 <= keep <= 1:
        raise FedlensError(f"--keep={keep} must be in [0, 1]: it is a fraction.")
    folder, points = find_run(run, root), sorted({0.0, *grid(scales)})
    require_kept_rounds(folder)

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import client_algebra

        run = load_run(folder, stop, overrides)
        contributed = client_algebra.contributions(run)
        return client_algebra.forget(
            run, name, contributed, points, label=label, client=client, keep=keep
        )

    target = f"class{label}" if client is None else f"client{client}"
    settings = {"label": label, "client": client, "scales": points, "keep": keep}
    compute_or_load(folder, analysis_name("forget", target, **settings), compute, figure)


@app.command()
def interference(
    run: RunName,
    overrides: RuntimeOverrides = None,
    pair: Annotated[
        str | None, typer.Option(help="Two clients, `3,7`; default: the first two of the round.")
    ] = None,
    alphas: Alphas = "0,0.5,1,1.5,2",
    number: Round = None,
    figure: FigureFile = None,
    root: Root = RUNS,
    _plugins: Plugins = None,
) -> None:
    """Measure how client updates interfere: cosines, sign conflicts, weight disentanglement.

    It uses validation images only.

    Example: `fedlens arithmetic interference fedavg --pair 3,7 --alphas 0:2:0.25`
    """
    folder, points = find_run(run, root), grid(alphas)
    require_kept_rounds(folder)
    both = integers(pair, "--pair")
    if both and len(both) != 2:
        raise FedlensError("--pair takes two different clients, such as 3,7.")

    def compute(name: str, stop: StopRequest) -> Record:
        from fedlens.analyses import interference

        two = (both[0], both[1]) if both else None
        run = load_run(folder, stop, overrides)
        return interference.interference(run, name, points, pair=two, number=number)

    words = [*(["+".join(map(str, both))] if both else []), *_round_words(number)]
    settings = {"pair": both, "alphas": points, "round": number}
    compute_or_load(folder, analysis_name("interference", *words, **settings), compute, figure)


def _merge_methods(names: Sequence[str], words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each method's parameters, checked; without `scale`, which --scales sets."""
    readable = {
        name: [one.name for one in merge_method[name].parameters if one.name != "scale"]
        for name in dict.fromkeys(names)
    }
    values: dict[str, dict[str, Any]] = {name: {} for name in readable}
    for word in words:
        key, value = assignment(word, "--parameter")
        method, _, parameter = key.rpartition(".")
        readers = [n for n in readable if parameter in readable[n] and method in ("", n)]
        if not readers:
            known = {one for parameters in readable.values() for one in parameters}
            options = suggest(parameter, known) if known else "they have no parameters."
            raise FedlensError(f"--parameter {key} is not read by {', '.join(readable)}: {options}")
        for name in readers:
            values[name][parameter] = value
    checked = {name: merge_method[name].checked(values[name], name) for name in readable}
    return {name: {key: checked[name][key] for key in keys} for name, keys in readable.items()}


def _digest(folder: RunFolder) -> str:
    """The parameters of another run: it may be repeated under the same name."""
    return str(require_result(folder)["choice"]["parameters"])


def _span(points: list[float]) -> str:
    return f"{points[0]:g}to{points[-1]:g}"


def _round_words(number: int | None) -> list[str]:
    return [] if number is None else [f"round{number}"]
