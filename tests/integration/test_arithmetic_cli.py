"""`fedlens arithmetic` on finished runs: exact results, one test evaluation, clear errors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedlens import params
from fedlens.analyses.grids import grid
from fedlens.config.compose import compose, load
from fedlens.data.splits import SealedTest
from fedlens.errors import FedlensError
from fedlens.experiments import loaded_run
from fedlens.experiments.build import Experiment, build
from fedlens.experiments.clients import local_session
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.experiments.run import start
from fedlens.registry import merge_method
from fedlens.runtime.stop import StopRequest
from fedlens.store.analysis_records import analysis_name
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Call

Record = dict[str, Any]
SKEWED = ["partition=dirichlet", "partition.alpha=0.3", "partition.min_size=1"]
KEPT = ["federated.keep_updates=2", "evaluate.select=last"]
SPARSE = ["sparse.density=0.1", "sparse.rule=random", "head.freeze=true", "augment=none"]


class Runs(NamedTuple):
    root: Path
    fed: RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A federated run, a central one of the same model, one of another model, an unfinished one."""
    root = tmp_path_factory.mktemp("runs")

    def run(name: str, *overrides: str) -> RunFolder:
        place = [f"run.root={root}", f"run.name={name}"]
        return start(compose("quickstart", [*TINY, *place, *overrides]))

    fed = run("fed", *FEDERATED, *ON_FEATURES, *SKEWED, *KEPT, "train.lr=0.3")
    run("central", *ON_FEATURES, "train.epochs=1")
    run("whole", "head=ridge", "train.trainable=head", "augment=standard")
    (root / "half").mkdir()
    shutil.copy(fed.config, root / "half")
    return Runs(root, fed)


@pytest.fixture
def arithmetic(fedlens: Call, finished: Runs) -> Call:
    return lambda *words: fedlens("arithmetic", *words, "--runs", str(finished.root))


def recorded(answer: tuple[int, str, str]) -> Record:
    """The record that a command printed the path of; its figure exists."""
    code, out, err = answer
    assert code == 0, err
    (path,) = (line.removeprefix("record: ") for line in out.splitlines() if "record.json" in line)
    assert (Path(path).parent / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert f"figure: {Path(path).parent / 'figure.png'}" in out
    record: Record = json.loads(Path(path).read_text())
    return record


def result(folder: RunFolder) -> Record:
    assert folder.result is not None
    return folder.result


def after(folder: RunFolder, number: int) -> Record:
    """The validation metrics after a round, as the run recorded them."""
    (line,) = (line for line in folder.journal("metrics").read() if line["round"] == number)
    validation: Record = line["validation"]
    return validation


def test_alpha_0_is_the_start_and_alpha_1_is_the_run(
    arithmetic: Call, finished: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    openings: list[object] = []
    real = SealedTest.open

    def counted(self: SealedTest, choice: Any) -> Any:
        openings.append(choice)
        return real(self, choice)

    monkeypatch.setattr(SealedTest, "open", counted)
    words = ["alpha", "fed", "--alphas", "-0.5:1.5:0.5", "--figure", str(tmp_path / "a.pdf")]
    answer = arithmetic(*words)
    record = recorded(answer)
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    rows = {row["alpha"]: row["validation"] for row in record["candidates"]}
    assert list(rows) == [-0.5, 0.0, 0.5, 1.0, 1.5]
    initial = built(finished.fed)
    untrained = Evaluator(initial.model, initial, batch_size=256, stop=StopRequest()).validation()
    assert untrained is not None
    assert rows[0.0] == untrained.metrics()
    assert rows[1.0] == result(finished.fed)["validation"]
    best = max(row["top1"] for row in rows.values())
    assert list(rows.values())[record["chosen"]]["top1"] == best
    assert record["barrier"] >= 0
    assert len(openings) == 1

    monkeypatch.setattr(loaded_run, "build", None)  # nothing is computed again
    again = arithmetic(*words)
    assert again[1] == answer[1]
    assert recorded(again) == record
    assert len(openings) == 1


def test_a_record_is_shown_without_torch(arithmetic: Call, finished: Runs) -> None:
    words = ["alpha", "fed", "--alphas", "1", "--runs", str(finished.root)]
    recorded(arithmetic(*words[:-2]))
    code = (
        f"import sys; sys.argv = ['fedlens', 'arithmetic', *{words!r}];"
        "from fedlens.cli import app; app(standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_base_may_be_the_ridge_or_the_central_model(arithmetic: Call, finished: Runs) -> None:
    central = result(RunFolder(finished.root / "central"))
    record = recorded(arithmetic("alpha", "fed", "--base", "central", "--alphas", "0,1"))
    assert record["candidates"][0]["validation"] == central["validation"]
    ridge = recorded(arithmetic("alpha", "fed", "--base", "ridge", "--alphas", "0,1"))
    whole = result(RunFolder(finished.root / "whole"))
    assert ridge["candidates"][0]["validation"] == pytest.approx(whole["validation"], rel=1e-4)
    assert ridge["candidates"][1]["validation"] == result(finished.fed)["validation"]


def test_task_vectors_of_runs_are_added(arithmetic: Call, finished: Runs) -> None:
    record = recorded(arithmetic("compose", "fed=1", "central=-1", "--alphas", "0,1"))
    assert record["terms"] == {"fed": 1.0, "central": -1.0}
    alone = recorded(arithmetic("compose", "fed=0.5", "--alphas", "0,2"))
    assert alone["candidates"][1]["validation"] == result(finished.fed)["validation"]
    assert record["candidates"][0] == alone["candidates"][0]


def test_averaging_a_rounds_updates_gives_the_model_after_it(
    arithmetic: Call, finished: Runs
) -> None:
    record = recorded(arithmetic("merge", "fed", "--scales", "0,1"))
    assert {row["method"] for row in record["candidates"]} == set(merge_method.names)
    rows = {(row["method"], row["scale"]): row["validation"] for row in record["candidates"]}
    assert rows["average", 1.0] == after(finished.fed, 3)
    assert record["round"] == 3
    methods = merge_method.names
    assert all(rows[method, 0.0] == after(finished.fed, 2) for method in methods)
    assert len({json.dumps(rows[method, 1.0]) for method in methods}) == len(methods)
    earlier = recorded(
        arithmetic("merge", "fed", "--scales", "1", "--method", "average", "--round", "2")
    )
    assert earlier["candidates"][0]["validation"] == after(finished.fed, 2)


MERGED = {
    "regmean": ["algorithm.statistics_examples=6"],
    "fisher_average": SPARSE,
    "tsv_merge": SPARSE,
    "iso_c": [],
}


@pytest.mark.parametrize("method", MERGED)
def test_merging_a_kept_round_again_gives_what_the_server_made_of_it(
    method: str, arithmetic: Call, finished: Runs
) -> None:
    """Statistics are computed again from the clients' data, bit for bit as they were sent."""
    words = [*FEDERATED, *MERGED[method], "federated.rounds=2", *KEPT, f"algorithm={method}"]
    place = [f"run.root={finished.root}", f"run.name=by-{method}"]
    folder = start(compose("quickstart", [*TINY, *place, *words]))
    mean = ["--parameter", "mean=true"] if method in ("tsv_merge", "iso_c") else []
    record = recorded(
        arithmetic("merge", f"by-{method}", "--method", method, "--scales", "1", *mean)
    )
    tuned = loaded_run.load_run(folder, StopRequest()).tuned
    assert record["choice"]["parameters"] == params.digest(tuned)
    assert record["candidates"][0]["validation"] == after(folder, 2)


def test_dropping_nobody_gives_the_trained_model(arithmetic: Call, finished: Runs) -> None:
    record = recorded(arithmetic("clients", "fed"))
    assert record["rounds"] == [2, 3]
    for row in record["candidates"]:
        assert row["validation"] == pytest.approx(result(finished.fed)["validation"], rel=1e-6)
    assert record["test"]["per_class"] == result(finished.fed)["test"]["per_class"]


def test_the_target_is_the_classes_of_the_reweighted_clients(
    arithmetic: Call, finished: Runs
) -> None:
    everybody = {client for n in (2, 3) for client in _participants(finished.fed, n)}
    one, other = sorted(everybody)[:2]
    words = ["--drop", str(one), "--weight", f"{other}=0.5"]
    record = recorded(arithmetic("clients", "fed", *words))
    assert record["coefficients"] == {str(one): 0.0, str(other): 0.5}
    before, edited = record["candidates"]
    assert before["validation"]["loss"] != edited["validation"]["loss"]
    partition = finished.fed.partition
    assert partition is not None
    held = [a + b for a, b in zip(*(partition["histogram"][k] for k in (one, other)), strict=True)]
    accuracy = record["test"]["per_class"]
    target = [right for right, count in zip(accuracy, held, strict=True) if count]
    assert record["test"]["target"] == pytest.approx(sum(target) / len(target))
    assert set(record["as_trained"]["test"]) == {*result(finished.fed)["test"], "target", "control"}


def test_forgetting_keeps_the_required_control_accuracy(arithmetic: Call, finished: Runs) -> None:
    client = _participants(finished.fed, 3)[0]
    words = ["forget", "fed", "--client", str(client), "--scales", "1,4"]
    record = recorded(arithmetic(*words, "--keep", "0.9"))
    rows = record["candidates"]
    assert [row["scale"] for row in rows] == [0, 1, 4]  # 0 is added
    assert rows[0]["validation"] == pytest.approx(result(finished.fed)["validation"], rel=1e-6)
    chosen = rows[record["chosen"]]
    assert chosen["control"] >= 0.9 * rows[0]["control"]
    assert chosen["target"] == min(
        row["target"] for row in rows if row["control"] >= 0.9 * rows[0]["control"]
    )
    label = _forgettable(finished.fed)
    of_class = recorded(arithmetic("forget", "fed", "--class", str(label), "--scales", "0,1"))
    assert of_class["clients"]
    assert of_class["client"] is None


def test_interference_of_a_round(arithmetic: Call, finished: Runs) -> None:
    clients = _participants(finished.fed, 3)
    pair = [clients[2], clients[0]]
    words = ["--pair", ",".join(map(str, pair)), "--alphas", "0,1"]
    record = recorded(arithmetic("interference", "fed", *words))
    assert (record["round"], record["clients"], record["pair"]) == (3, clients, pair)
    (line,) = (one for one in finished.fed.journal("metrics").read() if one["round"] == 3)
    others = [v for a, row in enumerate(record["cosine"]) for b, v in enumerate(row) if a != b]
    assert sum(others) / len(others) == pytest.approx(line["cosine"], abs=1e-4)
    assert record["disentanglement_error"][0][0] == 0
    assert not (finished.fed.path / "arithmetic" / "choice.json").exists()


def test_methods_are_listed(arithmetic: Call) -> None:
    code, out, _ = arithmetic("merge", "--list")
    assert code == 0
    for name in merge_method.names:
        assert name in out
        assert merge_method[name].paper.split(",")[0] in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("alpha fed --alphas 0:1", "is not a grid of numbers"),
        ("alpha fed --alphas 0,x", "is not a grid of numbers"),
        ("alpha nothing", "No run 'nothing'"),
        ("alpha half", "half is not finished"),
        ("alpha fed --base half", "half is not finished"),
        ("alpha fed --base whole", "whole has a different model than fed"),
        ("alpha fed --figure a.jpeg", "A figure must be a .png"),
        ("alpha fed train.lr=1", "cannot be changed"),
        ("compose fed", "is not of the form RUN=COEF"),
        ("compose fed=1 fed=2", "named twice"),
        ("compose fed=1 whole=1", "whole has a different model than fed"),
        ("merge", "Name a RUN"),
        ("merge fed --method tie", "did you mean 'ties'"),
        ("merge fed --parameter density=0", "ties.density=0.0 must be in (0, 1]"),
        ("merge fed --round 1", "choose from 2 to 3"),
        ("merge central", "kept no client updates"),
        ("clients central", "kept no client updates"),
        ("clients fed --drop 99", "Client 99 did not take part"),
        ("clients fed --drop x", "--drop takes integers"),
        ("clients fed --weight 2", "is not of the form CLIENT=FACTOR"),
        ("clients fed --weight 2=1 --weight 2=3", "names a client twice"),
        ("forget fed", "either --class N or --client N"),
        ("forget fed --class 1 --client 1", "either --class N or --client N"),
        ("forget fed --class 100", "There is no class 100"),
        ("forget fed --client 99", "Client 99 took no part"),
        ("forget fed --class 1 --keep 2", "must be in [0, 1]"),
        ("interference fed --pair 1", "--pair takes two different clients"),
        ("interference fed --pair 98,99", "Client 98 sent no update"),
    ],
)
def test_mistakes_are_one_sentence(arithmetic: Call, words: str, complaint: str) -> None:
    code, _, err = arithmetic(*words.split())
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last
    assert "Traceback" not in err


def test_client_algebra_of_a_sparse_run(arithmetic: Call, finished: Runs) -> None:
    """Updates travel packed; all weights outside the masks stay as pretrained."""
    few = ["federated.rounds=2", "federated.keep_updates=1", "evaluate.select=last"]
    place = [f"run.root={finished.root}", "run.name=sparse"]
    folder = start(compose("quickstart", [*TINY, *FEDERATED, *SPARSE, *few, *place]))
    merged = recorded(arithmetic("merge", "sparse", "--method", "average", "--scales", "1"))
    assert merged["candidates"][0]["validation"] == pytest.approx(after(folder, 2), rel=1e-6)
    loaded = loaded_run.load_run(folder, StopRequest())
    masks = loaded.experiment.masks
    assert merged["choice"]["parameters"] == params.digest(loaded.tuned)
    moved = {name: loaded.start[name] != value for name, value in loaded.tuned.items()}
    assert all((moved[name] <= mask).all() for name, mask in masks.items())
    assert {name for name, where in moved.items() if where.any()} <= masks.keys()
    dropped = recorded(arithmetic("clients", "sparse"))
    assert dropped["candidates"][1]["validation"] == pytest.approx(after(folder, 2), rel=1e-6)


def test_grids_of_numbers() -> None:
    assert grid("0:1.5:0.1") == [round(n / 10, 1) for n in range(16)]
    assert grid("1,0.5,1,-0") == [0.0, 0.5, 1.0]
    assert grid("0:0.3:0.1") == [0.0, 0.1, 0.2, 0.3]
    assert grid("0:1:0.3") == [0.0, 0.3, 0.6, 0.9]
    assert grid("1:0:-0.5") == [0.0, 0.5, 1.0]
    for wrong in ("", "0:1:0", "0:1:-1", "0:inf:1", "nan", "0:1:1e-9", "0:1:0.1:2", "a:b:c"):
        with pytest.raises(FedlensError, match="is not a grid"):
            grid(wrong)


def test_analyses_with_different_arguments_have_different_names() -> None:
    names = {analysis_name("alpha", "a run/with: signs", alphas=[0.0, n]) for n in (1.0, 2.0)}
    assert len(names) == 2
    for name in names:
        assert name.startswith("alpha-a_run_with_signs-")
    assert len(analysis_name("x" * 500)) < 100


def _participants(folder: RunFolder, number: int) -> list[int]:
    (line,) = (line for line in folder.journal("metrics").read() if line["round"] == number)
    clients: list[int] = line["clients"]
    return clients


def _forgettable(folder: RunFolder) -> int:
    """A class of some client of the last round that has a validation image."""
    experiment = built(folder)
    assert experiment.validation is not None
    counts = experiment.class_counts[_participants(folder, 3)].sum(0)
    return next(label for label in experiment.validation.labels.tolist() if counts[label])


def built(folder: RunFolder) -> Experiment:
    """A run's experiment before training."""
    config, stop = load(folder.config), StopRequest()
    return build(config, torch.device("cpu"), stop, local_session(config, stop).data)
