"""The committed records say what the committed words claim: suites, README, docs, report."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from fedlens.config.compose import compose, experiments, within
from fedlens.config.identity import identity
from fedlens.config.schema import Config
from fedlens.registry import mask_rule
from fedlens.reporting import assemble
from fedlens.reporting.study import runs as study_runs
from fedlens.reporting.study.content import About, Grid
from fedlens.store.archive import extracted
from fedlens.store.run_folder import runs
from fedlens.suites.plan import folder_of
from fedlens.suites.suite import find, only

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "results" / "cifar100_cpu"
SECOND = ROOT / "results" / "cifar100"  # begun: of its suites only a part was run
README = (ROOT / "README.md").read_text()
FINDINGS = README.partition("<!-- findings -->")[2].partition("<!-- /findings -->")[0]
FIRST_PAGE = (ROOT / "docs" / "study-64px.md").read_text()
ANSWERS = FIRST_PAGE.partition("<!-- answers -->")[2].partition("<!-- /answers -->")[0]
PAGE = (ROOT / "docs" / "study.md").read_text()
CHAIN = PAGE.partition("<!-- chain -->")[2].partition("<!-- /chain -->")[0]
RATES = PAGE.partition("<!-- rates -->")[2].partition("<!-- /rates -->")[0]
SEEDS = PAGE.partition("<!-- seeds -->")[2].partition("<!-- /seeds -->")[0]
HEADLINE = README.partition("<!-- headline -->\n")[2].partition("<!-- /headline -->")[0]

NUMBER = r"\b\d+\.\d\d\b"
INTERVAL = rf"({NUMBER}) ± ({NUMBER})"

Method = tuple[Any, ...]


def method(config: dict[str, Any]) -> Method:
    """What has a learning rate of its own: a way of training on a partition."""
    partition, sparse = config["partition"], config["sparse"]
    federated = config["federated"]["clients"] is not None
    return (
        config["train"]["trainable"]["name"],
        config["head"]["name"],
        sparse["density"] and sparse["rule"]["name"],
        federated and (partition["name"], partition.get("classes_per_client")),
    )


def averages(algorithm: dict[str, Any]) -> bool:
    """Whether it is FedAvg as it is."""
    chosen = [algorithm[key]["name"] for key in ("sampling", "aggregator", "server")]
    plain = not algorithm["scaffold"] and not algorithm["proximal"]
    return plain and chosen == ["uniform", "mean", "sgd"] and algorithm["server"]["lr"] == 1.0


def tuned() -> dict[Method, dict[float, float]]:
    """Method → learning rate → validation accuracy at the end of its trial."""
    found: dict[Method, dict[float, float]] = {}
    for run in runs(STUDY / "tuning.tar.xz"):
        config = yaml.safe_load(run.config.read_text())
        if not averages(config["algorithm"]) or config["sparse"]["source"] != "validation":
            continue  # an idea, tried at a learning rate found here
        last = run.journal("metrics").read()[-1]["validation"]["top1"]
        found.setdefault(method(config), {})[config["train"]["lr"]] = last
    return found


def studied() -> list[Config]:
    """What is trained by averaging in the study, but for what sweeps vary."""
    return [
        cell.config
        for cell in find("cifar100_cpu").cells(seeds=1)
        if averages(asdict(cell.config.algorithm))
        and not cell.section.startswith("sweeps")
        and not (cell.config.train.trainable.name == "head" and cell.config.head.freeze)
    ]


@pytest.mark.slow
def test_every_learning_rate_of_the_study_is_the_best_on_validation_of_its_trials() -> None:
    trials = tuned()
    for config in studied():
        tried = trials[method(asdict(config))]
        assert min(tried) < config.train.lr < max(tried)
        assert config.train.lr == max(tried, key=lambda lr: tried[lr])


@pytest.mark.parametrize("study", [STUDY, SECOND], ids=lambda study: study.name)
def test_no_trial_opened_the_test_split(study: Path) -> None:
    for run in runs(study / "tuning.tar.xz"):
        assert "test" not in (run.result or {})


class Chain(NamedTuple):
    """The setting of a trial of a chain."""

    partition: str
    lr: float
    steps: int = 4  # of a visit
    refit: int = 10  # rounds between heads
    density: float | None = None  # of a random mask
    clip: float | None = None  # the largest norm of a gradient


SHORT_ROW = "chain of short visits, head solved again every cycle / random 40 %"
SHORT = Chain("classes", 0.03, steps=1, density=0.4, clip=10)  # what the study tests, beside J = 4


def trials_at_112_px() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The config and the result of each run that chose a setting of the suite `cifar100`."""
    names = {folder_of(cell.config).name for cell in find("cifar100_tuning").cells()}
    for run in runs(SECOND / "tuning.tar.xz"):
        config = run.read_config()
        assert run.name in names
        assert (config["seed"], config["backbone"]["resolution"]) == (0, 112)
        yield config, run.result or {}


def chain_trials() -> dict[Chain, float]:
    """Validation accuracy in % at the end of each trial of a chain."""
    found = {}
    for config, result in trials_at_112_px():
        if config["algorithm"]["sampling"]["name"] == "chain":
            federated, train = config["federated"], config["train"]
            setting = Chain(
                config["partition"]["name"],
                train["lr"],
                federated["local_steps"],
                federated["refit_head"],
                config["sparse"]["density"],
                train["clip_norm"],
            )
            found[setting] = round(100 * result["validation"]["top1"], 2)
    return found


def chain_rates(like: Chain) -> dict[float, float]:
    """Learning rate → accuracy, of trials with this setting but for the rate."""
    trials = chain_trials()
    return {key.lr: value for key, value in trials.items() if key == like._replace(lr=key.lr)}


def test_the_table_of_chains_is_what_the_records_say() -> None:
    said = {}
    for line in CHAIN.split("\n"):
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        named = r"J=(\d), (0\.\d+)(?:, every (\d+) rounds)?(?:, (\d+) %)?(, clipped)?"
        if match := re.fullmatch(named, label):
            steps, lr, refit = int(match[1]), float(match[2]), int(match[3] or 10)
            density, clip = match[4] and int(match[4]) / 100, 10.0 if match[5] else None
            setting = Chain("", lr, steps, refit, density, clip)
            columns = zip(("iid", "classes"), cells, strict=True)
            said |= {setting._replace(partition=name): cell for name, cell in columns if cell}
    assert said == {key: f"{value:.2f}" for key, value in chain_trials().items()}


def test_the_differences_between_chains_are_those_of_their_table() -> None:
    told = PAGE.partition("<!-- /chain -->")[2].partition("These numbers come")[0]
    trials = {name: chain_rates(Chain(name, 0)) for name in ("iid", "classes")}
    best = {name: max(rates.values()) for name, rates in trials.items()}
    assert f"gains {best['classes'] - 73.58:.2f} points" in told
    assert f"is {best['iid'] - best['classes']:.2f} points below the best" in told
    same = [trials["iid"][lr] - trials["classes"][lr] for lr in (0.003, 0.01)]
    assert f"it is {same[0]:.2f} or {same[1]:.2f} points" in told
    assert f"the difference is {same[1]:.2f} points" in told
    for short in (Chain("", 0, steps=2, refit=5), SHORT):
        iid, classes = (chain_rates(short._replace(partition=name)) for name in trials)
        reached, below = max(classes.values()), max(iid.values()) - max(classes.values())
        assert re.search(rf"{reached:.2f}[^.]*, {below:.2f} points below", told)
    assert re.search(rf"it\s+is {classes[0.03] - iid[0.03]:.2f} points above", told)
    curves = [run.journal("metrics").read() for run in runs(SECOND / "tuning.tar.xz")]
    looks = [
        one for curve in curves for one in curve if one.get("round") == 8 and "validation" in one
    ]
    known = {f"{100 * one['validation']['top1']:.2f} %" for one in looks}
    assert set(re.findall(r"\d+\.\d\d %", told)) <= known


def test_bytes_and_gradients_of_short_visits_are_those_of_the_records() -> None:
    page = PAGE.partition("## A chain of clients")[2].partition("These numbers")[0]
    told = " ".join(page.split())
    gigabytes, norms = {}, {}
    for run in runs(SECOND / "tuning.tar.xz"):
        config = run.read_config()
        federated, clip = config["federated"], config["train"]["clip_norm"]
        if config["algorithm"]["sampling"]["name"] != "chain":
            continue
        rounds = [one for one in run.journal("metrics").read() if one["round"]]
        heads = sum(one.get("refit", {}).get("bytes_up", 0) for one in rounds)
        visits = sum(one["bytes_down"] + one["bytes_up"] for one in rounds) - heads
        if federated["refit_head"] == 10 and config["sparse"]["density"] in (None, 0.4):
            gigabytes[federated["local_steps"]] = f"{visits / 1e9:.1f}", f"{heads / 1e9:.1f}"
        if (federated["local_steps"], config["train"]["lr"]) == (1, 0.03):
            lengths = [norm / one["lr"] for one in rounds for norm in one["update_norms"]]
            norms[config["partition"]["name"], clip] = lengths
    (four, heads_of_four), (one, heads_of_one) = gigabytes[4], gigabytes[1]
    assert f"J = 4 take {four} GB for weights and heads, the 1,280 of J = 1 {one} GB" in told
    assert f"takes {heads_of_four} and {heads_of_one} GB more" in told
    iid, free, clipped = norms["iid", 10], norms["classes", None], norms["classes", 10]
    assert f"is {median(free):.1f} at Nc=1, and {median(iid):.1f} with IID data" in told
    shares = [100 * sum(norm > 9.99 for norm in some) / len(some) for some in (clipped, iid)]
    assert f"{shares[0]:.0f} % of them at Nc=1 and {shares[1]:.0f} % with IID data" in told


@pytest.mark.parametrize(
    ("column", "words"),
    [("Nc=1", ["partition=classes", "partition.classes_per_client=1"]), ("IID", ["train.lr=0.1"])],
)
def test_the_experiment_short_visits_is_the_method_of_the_study(
    column: str, words: list[str]
) -> None:
    (cell,) = only(find("cifar100").cells(seeds=1), [f"{SHORT_ROW} / {column}"])
    ours = identity(
        compose("short_visits", ["backbone=vit_tiny", "backbone.resolution=112", "seed=1", *words])
    )
    study = identity(cell.config)
    different = {key for key in ours | study if ours.get(key) != study.get(key)}
    assert different <= {"experiment", "sparse.examples"}  # a random mask needs no examples


@pytest.mark.slow
def test_what_short_visits_is_said_to_reach_is_the_mean_of_its_runs() -> None:
    cells = script("suite_table").accuracies("cifar100", SECOND / "runs.tar.xz")
    means = [f"{fmean(cells[SHORT_ROW, column]):.1f} %" for column in ("Nc=1", "IID")]
    (told,) = (entry for entry in experiments() if entry.name == "short_visits")
    reference = (ROOT / "docs" / "reference" / "experiments.md").read_text()
    assert f"{means[0]} with one class per client and {means[1]} on IID data" in told.documentation
    assert f"{means[0]} at Nc=1, {means[1]} IID" in reference


# What may differ between a trial and the runs that take its learning rate: length and measuring.
TRIAL_KEYS = (
    "seed", "train.lr", "federated.local_step_budget", "train.steps_per_epoch", "evaluate",
    "federated.keep_updates",
)  # fmt: skip
# Cells that take the learning rate of another one, whose trials are on record.
BORROWED = {
    "FedAvg / J=4 / Nc=10": "FedAvg / J=4 / Nc=5",
    "FedAvg / J=4 / Nc=50": "FedAvg / J=4 / IID",
    "trained heads / J=4 / Nc=10": "trained heads / J=4 / Nc=5",
    "trained heads / J=4 / Nc=50": "trained heads / J=4 / IID",
}


def way(config: Config) -> str:
    """What has a learning rate of its own in the second study."""
    left_out, sparse = [*TRIAL_KEYS], config.sparse
    if sparse.density is None:
        left_out.append("sparse")
    elif not mask_rule[sparse.rule.name].traits.get("sensitivity", True):
        left_out.append("sparse.examples")  # which measure the sensitivity
    kept = {key: one for key, one in identity(config).items() if not within(key, left_out)}
    return json.dumps(kept, sort_keys=True)


@pytest.fixture(scope="module")
def rates() -> dict[str, dict[float, float]]:
    """Way of training → learning rate → validation accuracy at the end of its trial."""
    found: dict[str, dict[float, float]] = {}
    results = {run.name: run.result for run in runs(SECOND / "tuning.tar.xz")}
    for cell in find("cifar100_tuning").cells():
        if result := results.get(folder_of(cell.config).name):
            tried = found.setdefault(way(cell.config), {})
            tried[cell.config.train.lr] = round(100 * result["validation"]["top1"], 2)
    return found


@pytest.mark.slow
def test_the_table_of_learning_rates_is_what_the_records_say() -> None:
    tables = script("rate_table")
    named = re.findall(r"--only '([^']+)'", PAGE.partition("python results/rate_table.py")[2])
    tried = tables.trials("cifar100_tuning", SECOND / "tuning.tar.xz", named)
    assert "\n".join(tables.table(tried)) == RATES.strip()


@pytest.mark.slow
def test_learning_rates_of_the_second_study_are_the_best_on_validation_of_their_trials(
    rates: dict[str, dict[float, float]],
) -> None:
    """Of all that has run, and with a worse neighbour on either side."""
    suite = find("cifar100")
    cells = {cell.label: cell.config for cell in suite.cells(seeds=1)}
    names = {run.name for run in runs(SECOND / "runs.tar.xz")}
    ran = {cell.label for cell in suite.cells() if folder_of(cell.config).name in names}
    assert {"FedAvg / J=4 / Nc=1", "central / dense", f"{SHORT_ROW} / IID"} <= ran
    for label in ran:
        config = cells[label]
        if config.train.trainable.name == "head" and config.head.name != "linear":
            continue  # a head in closed form
        like = cells[BORROWED.get(label, label)]
        tried, lr = rates[way(like)], config.train.lr
        assert lr == like.train.lr, label
        assert min(tried) < lr < max(tried), label
        assert lr == max(tried, key=lambda one: tried[one]), label


@pytest.fixture(scope="module")
def second() -> tuple[str, str]:
    """The tables of the second study as far as it has run: accuracies, and answers."""
    tables, records = script("suite_table"), SECOND / "runs.tar.xz"
    accuracies = tables.table(tables.accuracies("cifar100", records))
    return "\n".join(accuracies), "\n".join(
        tables.answer_table(tables.answers("cifar100", records))
    )


@pytest.mark.slow
def test_the_tables_of_the_second_study_are_what_the_records_say(second: tuple[str, str]) -> None:
    assert all(table in SEEDS for table in second)


@pytest.mark.slow
@pytest.mark.parametrize("words", [SEEDS, FINDINGS], ids=["study", "README"])
def test_every_number_of_the_second_study_is_in_its_tables(
    second: tuple[str, str], words: str
) -> None:
    """Those of single seeds as well, which have no interval."""
    known = {tuple(one) for one in re.findall(INTERVAL, "".join(second))}
    said = {tuple(one) for one in re.findall(INTERVAL, words)}
    assert said
    assert said <= known
    sentences = re.sub(r"(?m)^\|.*$", "", words)
    single = set(re.findall(rf"({NUMBER}) \(1\)", second[0]))
    assert set(re.findall(NUMBER, re.sub(INTERVAL, "", sentences))) <= single
    stated = re.findall(
        rf"{INTERVAL}[^.±]*\(\d seeds,\s+p (?:= )?(< 0\.001|[01]\.\d{{3}})", sentences
    )
    assert len(stated) == len(re.findall(r"\bp [=<]", sentences)) > 0
    for mean, half, p in stated:
        assert re.search(rf"(?m){mean} ± {half} .*\| {re.escape(p)} \|$", second[1])


@pytest.mark.slow
def test_the_second_study_s_runs_are_of_its_suite_and_did_not_choose_its_settings() -> None:
    names = {folder_of(cell.config).name for cell in find("cifar100").cells()}
    found = runs(SECOND / "runs.tar.xz")
    assert {run.name for run in found} <= names
    assert all(run.read_config()["seed"] > 0 for run in found)


@pytest.mark.slow
def test_the_study_s_runs_are_those_of_its_suite() -> None:
    names = {folder_of(cell.config).name for cell in find("cifar100_cpu").cells()}
    assert {run.name for run in runs(STUDY / "runs.tar.xz")} == names


@pytest.mark.slow
@pytest.mark.parametrize("study", [STUDY, SECOND], ids=lambda study: study.name)
def test_the_audit_of_the_study_holds(study: Path) -> None:
    report = assemble.content(study_runs.read([study / "runs.tar.xz"]), About())
    assert report.audit
    assert all(check.passed for check in report.audit)


def test_the_table_of_closed_form_heads_is_what_the_records_say() -> None:
    """Accuracy and bytes of every head, and no run that the suite does not have."""
    found, sizes = {}, {}
    names = {folder_of(cell.config).name for cell in find("closed_form_heads").cells()}
    for run in runs(ROOT / "results" / "closed_form_heads.tar.xz"):
        result, config = run.result or {}, run.read_config()
        assert run.name in names
        assert "test" not in result
        head, resolution = config["head"], config["backbone"]["resolution"]
        tokens = 0 if head["name"] == "deep_ridge" else -1
        reads = HEADS[head["layers"] or tokens]
        kind = "Gaussian" if head["name"] == "gaussian" else "ridge"
        found[reads, f"{kind}, {resolution} px"] = f"{100 * result['validation']['top1']:.2f}"
        sizes[reads] = f"{result['facts']['statistics_bytes_up'] / 100 / 1e6:.1f}"
    table = PAGE.partition("<!-- heads -->")[2].partition("<!-- /heads -->")[0]
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line
    )
    said = {}
    for reads, size, *accuracies in lines:
        assert size == sizes[reads]
        cells = zip(header[2:], accuracies, strict=True)
        said |= {(reads, column): value for column, value in cells if value}
    assert said == found


HEADS = {-1: "class token", 0: "class and mean token"} | {n: f"{n} blocks" for n in range(1, 13)}


def test_records_name_no_place_of_a_machine() -> None:
    for archive in (ROOT / "results").rglob("*.tar.xz"):
        for path in extracted(archive).rglob("*"):
            if path.is_file():
                assert not re.search(r"/(home|root|tmp|work)/", path.read_text()), path


def numbers(grid: Grid) -> Iterator[float]:
    """All that a table says of test accuracy, in points, and p-values."""
    cells = [cell for row in grid.cells for cell in row if cell]
    for found in (*cells, *grid.contrasts):
        yield from (value for value in (found.mean, found.half) if value is not None)
    yield from (delta.corrected for delta in grid.contrasts if delta.corrected is not None)


@pytest.fixture(scope="module")
def grids() -> list[Grid]:
    report = assemble.content(study_runs.read([STUDY / "runs.tar.xz"]), About())
    return [grid for chapter in report.chapters for grid in chapter.grids]


@pytest.mark.slow
def test_every_number_of_the_answers_is_in_the_report(grids: list[Grid]) -> None:
    known = {f"{abs(number):.2f}" for grid in grids for number in numbers(grid)}
    said = set(re.findall(r"\b\d+\.\d\d\b", ANSWERS))
    assert said
    assert said <= known


def quoted(words: str) -> Iterator[tuple[str, str, str]]:
    """The mean, the half width and the p-value of each difference, where a sentence states a p.

    The p-value of a difference is the next one in its sentence.
    """
    for sentence in re.split(r"\.\s|\n- ", words):
        differences = re.finditer(r"(\d+\.\d\d) ± (\d+\.\d\d)", sentence)
        for difference in differences:
            if p := re.search(r"p = (0\.\d+)", sentence[difference.end() :]):
                yield difference[1], difference[2], p[1]


def test_p_values_belong_to_the_differences_before_them() -> None:
    words = "It loses 1.30 ± 0.25 and 8.50 ± 1.71 (p = 0.006 each).\n- It gains 2.00 ± 1.00.\n"
    assert list(quoted(words)) == [("1.30", "0.25", "0.006"), ("8.50", "1.71", "0.006")]


@pytest.mark.slow
def test_every_p_value_is_that_of_its_difference(grids: list[Grid]) -> None:
    """To as many decimals as it is quoted with."""
    contrasts = [found for grid in grids for found in grid.contrasts if found.corrected is not None]
    found = list(quoted(ANSWERS))
    assert len({p for _, _, p in found}) >= 2
    for mean, half, p in found:
        assert [
            one
            for one in contrasts
            if (f"{abs(one.mean):.2f}", f"{one.half:.2f}") == (mean, half)
            and f"{one.corrected:.{len(p) - 2}f}" == p
        ], (mean, half, p)
    assert len(re.findall(r"\bp = ", ANSWERS)) == len(re.findall(r"\bp = 0\.\d{2,3}\b", ANSWERS))


@pytest.mark.slow
def test_the_table_of_ideas_is_what_trials_ended_with() -> None:
    page = (ROOT / "results/README.md").read_text()
    told = page.partition("Ideas for Nc=1")[2].partition("###")[0]
    found = [
        *runs(STUDY / "tuning.tar.xz"),
        *runs(STUDY / "runs.tar.xz"),
    ]  # FedAvg itself is of the study
    ends = [run.journal("metrics").read() for run in found]
    known = {f"{100 * end[-1]['validation']['top1']:.2f}" for end in ends if end}
    said = set(re.findall(r"\b\d+\.\d\d\b", told))
    assert len(said) > 10
    assert said <= known


def test_parts_of_the_suite_that_are_named_exist() -> None:
    told = (ROOT / "results/README.md").read_text()
    named = re.findall(r"fedlens suite (\w+).*--only '([^']+)'", told)
    assert {suite for suite, _ in named} == {"cifar100_cpu", "cifar100_tuning"}
    assert all(only(find(suite).cells(), [part]) for suite, part in named)


def script(name: str) -> ModuleType:
    found = spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    assert found
    assert found.loader
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_headline_tables_are_what_the_records_say() -> None:
    assert script("headline").headline([STUDY / "runs.tar.xz"]) in FIRST_PAGE
    tables = script("suite_table")
    rows = tables.short(tables.accuracies("cifar100", SECOND / "runs.tar.xz"))
    assert "\n".join(tables.table(rows)) == HEADLINE.strip()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(HEADLINE.splitlines()) <= 2 + 10
    assert FINDINGS.count("- **") == 3


@pytest.mark.slow
def test_the_cosines_of_the_answers_are_those_of_the_records() -> None:
    known = {
        f"{value:.4f}" for value in script("interference").cosines([STUDY / "runs.tar.xz"]).values()
    }
    said = set(re.findall(r"\b0\.\d{4}\b", ANSWERS))
    assert len(said) == 4
    assert said <= known
