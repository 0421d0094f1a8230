"""The search itself, over runs that are a formula: what is suggested, kept, stopped, taken up."""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.trial import Trial

from fedlens.config.compose import compose, documentation
from fedlens.config.identity import identity
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.runtime.stop import Interrupted
from fedlens.store.run_folder import RunFolder
from fedlens.tuning.search import Search
from fedlens.tuning.space import DEFAULT, dimension, space
from fedlens.tuning.tune import run_search

UNITS = 4
LOST = FedlensError("The loss is not finite.")


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


class Formula:
    """Runs whose accuracy is best at lr = 0.01 and rises with every epoch, as `start` makes them.

    `die_at` kills at the n-th validation of all; `refuses` fails a config.
    """

    def __init__(
        self,
        *,
        die_at: int | None = None,
        refuses: Callable[[Config], bool] = lambda config: False,
        error: Exception = LOST,
    ) -> None:
        self.die_at = die_at
        self.refuses = refuses
        self.error = error
        self.seen: list[Config] = []
        self.validations = 0

    def __call__(self, config: Config, *, watch: Callable[[int, float], None]) -> RunFolder:
        self.seen.append(config)
        assert config.run.name is not None
        folder = RunFolder(Path(config.run.root) / config.run.name)
        if folder.result:
            return folder
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if self.refuses(config):
            raise self.error
        peak = (
            0.9 - 0.1 * abs(math.log10(config.train.lr) + 2) - config.train.optimizer.weight_decay
        )
        folder.journal("metrics").rewind(0)
        for epoch in range(1, UNITS + 1):
            top1 = peak * epoch / UNITS
            folder.journal("metrics").append({"epoch": epoch, "validation": {"top1": top1}})
            self.validations += 1
            if self.validations == self.die_at:
                raise Killed
            watch(epoch, top1)
        folder.write("result", {"validation": {"top1": peak}})
        return folder


def make_search(
    tmp_path: Path, *words: str, overrides: list[str] | None = None, **options: Any
) -> Search:
    overrides = [f"run.root={tmp_path}", *(overrides or [])]
    config = compose("quickstart", overrides)
    return Search(config, space(config, overrides, list(words)), **options)


def whole_words() -> list[str]:
    return ["train.epochs=4", "data.train_per_class=9", "threads=1"]


def outcome(record: dict[str, Any]) -> list[dict[str, Any]]:
    """All of the trials but how long they took."""
    return [{k: v for k, v in trial.items() if k != "seconds"} for trial in record["trials"]]


WHOLE = 13  # ten trials at random, and three that learn from them


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, dict[str, Any], Formula]:
    """A search nobody disturbed, its record, and the runs it made."""
    wanted = make_search(tmp_path_factory.mktemp("whole"), overrides=whole_words())
    formula = Formula()
    record = run_search(wanted, trials=WHOLE, start=formula, command="fedlens tune it")
    return wanted, record, formula


@pytest.mark.slow
def test_a_search_finds_the_better_learning_rates_and_leaves_them_in_files(whole: Any) -> None:
    wanted, record, _ = whole
    assert len(record["trials"]) == WHOLE
    best = record["trials"][record["best"] - 1]
    assert best["value"] == max(t["value"] for t in record["trials"] if t["state"] == "complete")
    assert 1e-3 < best["params"]["train.lr"] < 1e-1
    assert max(record["importance"], key=record["importance"].get) == "train.lr"
    assert sum(record["importance"].values()) == pytest.approx(1)
    stored = json.loads((wanted.folder / "trials.json").read_text())
    assert stored == json.loads(json.dumps(record))
    table = (wanted.folder / "trials.csv").read_text().splitlines()
    assert len(table) == 1 + WHOLE
    assert table[0] == (
        "number,state,value,train.lr,train.optimizer.weight_decay,train.schedule.name,run,failure"
    )


def test_no_trial_may_open_the_test_split(whole: Any) -> None:
    assert [config.evaluate.test for config in whole[2].seen] == [False] * WHOLE


def test_a_test_curve_is_for_the_best_alone(tmp_path: Path) -> None:
    wanted = make_search(tmp_path, overrides=["evaluate.test_curve=true"])
    formula = Formula()
    run_search(wanted, trials=1, start=formula)
    assert [config.evaluate.test_curve for config in formula.seen] == [False]
    assert compose(str(wanted.folder / "best.yaml"), []).evaluate.test_curve


def test_the_best_is_an_experiment_that_runs_as_searched_and_opens_the_test_split(
    whole: Any,
) -> None:
    wanted, record, _ = whole
    path = wanted.folder / "best.yaml"
    values = record["trials"][record["best"] - 1]["params"]
    by_words = compose("quickstart", [*whole_words(), *(f"{key}={v}" for key, v in values.items())])
    found = compose(str(path), [])
    assert identity(found) == identity(by_words)
    assert found.evaluate.test
    assert found.experiment == "quickstart"
    assert found.threads is None  # how it was searched is not how it must be run
    for word in ("fedlens tune it", f"fedlens run {path}", "not yet tested", "on validation",
                 "train.lr in log:0.0001:1.0", f"of {WHOLE}"):  # fmt: skip
        assert word in documentation(str(path))


def test_what_the_experiment_says_already_is_not_repeated_in_the_best(tmp_path: Path) -> None:
    fixed = [f"{key}=1e-3" for key in ("train.lr", "train.optimizer.weight_decay")]
    fixed = [*fixed, "train.schedule.name=cosine"]
    wanted = make_search(tmp_path, "train.optimizer.nesterov=false,true", overrides=fixed)
    run_search(wanted, trials=1, start=Formula())
    written = yaml.safe_load((wanted.folder / "best.yaml").read_text())
    assert written["train"].keys() <= {"lr", "optimizer"}
    assert written["train"]["optimizer"].keys() <= {"weight_decay", "nesterov"}


def test_a_trial_below_the_median_is_stopped_and_its_checkpoints_are_dropped(whole: Any) -> None:
    wanted, record, _ = whole
    pruned = [trial for trial in record["trials"] if trial["state"] == "pruned"]
    assert pruned
    for trial in pruned:
        step, value = trial["curve"][-1]
        before = [t for t in record["trials"][: trial["number"] - 1] if t["state"] == "complete"]
        assert len(before) >= 5
        assert value < statistics.median(dict(t["curve"])[step] for t in before)
    assert not list(wanted.folder.glob("runs/*/checkpoints"))


@pytest.mark.slow
def test_without_a_pruner_every_trial_comes_to_its_end(tmp_path: Path) -> None:
    record = run_search(make_search(tmp_path, pruner="none"), trials=7, start=Formula())
    assert [len(trial["curve"]) for trial in record["trials"]] == [UNITS] * 7


@pytest.mark.slow
def test_a_search_killed_again_and_again_ends_as_if_it_never_had_been(
    whole: Any, tmp_path: Path
) -> None:
    """Deaths before, between and after what learns from other trials; and sessions of few."""
    wanted = make_search(tmp_path, overrides=whole_words())
    for die_at in (1, 2, UNITS, UNITS + 1, 9, 14):
        with pytest.raises(Killed):
            run_search(wanted, trials=WHOLE, start=Formula(die_at=die_at))
    for trials in (10, 11, WHOLE):
        record = run_search(wanted, trials=trials, start=Formula())
    assert outcome(record) == outcome(whole[1])
    assert record["best"] == whole[1]["best"]
    assert record["importance"] == whole[1]["importance"]
    assert not list(wanted.folder.glob("runs/*/checkpoints"))


@pytest.mark.slow
def test_a_kill_before_the_parameters_are_known_changes_nothing(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, suggest, calls = make_search(tmp_path, overrides=whole_words()), Trial._suggest, [0]

    def dying(self: Trial, *words: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:  # the second of the second trial's three
            raise Killed
        return suggest(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Trial, "_suggest", dying)
        with pytest.raises(Killed):
            run_search(wanted, trials=3, start=Formula())
    record = run_search(wanted, trials=3, start=Formula())
    assert outcome(record) == outcome(whole[1])[:3]


@pytest.mark.slow
def test_a_killed_trial_keeps_its_parameters_and_its_run(tmp_path: Path) -> None:
    wanted, dying, after = make_search(tmp_path), Formula(die_at=6), Formula()
    with pytest.raises(Killed):
        run_search(wanted, trials=3, start=dying)
    (under_way,) = [f for f in (wanted.folder / "runs").iterdir() if (f / "checkpoints").exists()]
    run_search(wanted, trials=3, start=after)
    assert after.seen[0] == dying.seen[-1]
    assert after.seen[0].run.name == under_way.name


def test_another_seed_is_another_search_with_other_suggestions(whole: Any, tmp_path: Path) -> None:
    other = make_search(tmp_path, overrides=whole_words(), seed=1)
    assert other.folder.name != whole[0].folder.name
    (trial,) = run_search(other, trials=1, start=Formula())["trials"]
    assert trial["params"] != whole[1]["trials"][0]["params"]


@pytest.mark.slow
def test_a_finished_search_has_nothing_to_do_and_more_trials_extend_it(tmp_path: Path) -> None:
    wanted, again = make_search(tmp_path), Formula()
    run_search(wanted, trials=3, start=Formula())
    (wanted.folder / "best.yaml").unlink()  # as if killed just before it was written
    assert len(run_search(wanted, trials=3, start=again)["trials"]) == 3
    assert again.seen == []
    assert (wanted.folder / "best.yaml").exists()
    assert len(run_search(wanted, trials=5, start=again)["trials"]) == 5
    assert len(again.seen) == 2


@pytest.mark.slow
def test_a_failed_trial_is_recorded_and_does_not_count(tmp_path: Path) -> None:
    wild = Formula(refuses=lambda config: config.train.lr > 0.05)
    record = run_search(make_search(tmp_path), trials=4, start=wild)
    states = [trial["state"] for trial in record["trials"]]
    assert states.count("failed") > 0
    assert len(states) - states.count("failed") == 4
    for trial in record["trials"]:
        assert ("failure" in trial) == (trial["params"]["train.lr"] > 0.05)
    rates = [trial["params"]["train.lr"] for trial in record["trials"]]
    assert len(set(rates)) == len(rates)  # a failure is not suggested again


@pytest.mark.slow
def test_any_error_is_a_failed_trial_and_the_search_goes_on(tmp_path: Path) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")
    wild = Formula(refuses=lambda config: config.train.lr > 0.05, error=error)
    record = run_search(make_search(tmp_path), trials=3, start=wild)
    failures = {trial["failure"] for trial in record["trials"] if trial["state"] == "failed"}
    assert failures == {"RuntimeError: DefaultCPUAllocator: can't allocate memory"}
    assert sum(trial["state"] == "complete" for trial in record["trials"]) == 3


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_ends(tmp_path: Path) -> None:
    wanted = make_search(tmp_path)
    record = run_search(wanted, trials=2, start=Formula(refuses=lambda config: True))
    assert [trial["state"] for trial in record["trials"]] == ["failed"] * 2
    assert record["best"] is None
    assert not (wanted.folder / "best.yaml").exists()
    repaired = run_search(wanted, trials=1, start=Formula())
    assert [trial["state"] for trial in repaired["trials"]] == ["failed"] * 2 + ["complete"]


@pytest.mark.slow
def test_values_that_do_not_go_together_are_a_failed_trial(tmp_path: Path) -> None:
    wanted = make_search(
        tmp_path, "train.optimizer.nesterov=true,false", "train.optimizer.momentum=0.0,0.9", seed=1
    )
    record = run_search(wanted, trials=3, start=Formula())
    assert {trial["state"] for trial in record["trials"]} == {"complete", "failed"}
    for trial in record["trials"]:
        impossible = (
            trial["params"]["train.optimizer.nesterov"]
            and not trial["params"]["train.optimizer.momentum"]
        )
        assert (trial["state"] == "failed") == impossible


@pytest.mark.slow
def test_an_interrupted_search_says_how_to_go_on(tmp_path: Path) -> None:
    def stopped(config: Config, *, watch: object) -> RunFolder:
        raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted, match="same command"):
        run_search(make_search(tmp_path), trials=2, start=stopped)
    assert len(run_search(make_search(tmp_path), trials=2, start=Formula())["trials"]) == 2


@pytest.mark.slow
def test_when_the_time_is_over_the_trial_under_way_is_left_for_later(
    whole: Any, tmp_path: Path
) -> None:
    wanted, slow = make_search(tmp_path, overrides=whole_words()), Formula()
    hour = 3600.0

    def start(config: Config, *, watch: Callable[[int, float], None]) -> RunFolder:
        patch.setattr(time, "monotonic", lambda: now() + hour)
        return slow(config, watch=watch)

    now = time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        record = run_search(wanted, trials=2, start=start, minutes=30)
    assert record["trials"] == []
    assert slow.validations == 1
    assert outcome(run_search(wanted, trials=2, start=Formula())) == outcome(whole[1])[:2]


def test_a_name_holds_one_search(tmp_path: Path) -> None:
    run_search(make_search(tmp_path, name="mine"), trials=1, start=Formula())
    with pytest.raises(FedlensError, match="holds a different search: choose another --name"):
        run_search(make_search(tmp_path, name="mine", seed=5), trials=1, start=Formula())
    run_search(
        make_search(tmp_path, name="mine", overrides=["threads=3"]), trials=1, start=Formula()
    )


def test_a_broken_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    wanted = make_search(tmp_path)
    wanted.folder.mkdir(parents=True)
    (wanted.folder / "study.db").write_text("not a database " * 100)
    with pytest.raises(FedlensError, match=r"study\.db cannot be used"):
        run_search(wanted, trials=1, start=Formula())


def test_a_search_without_validation_is_refused(tmp_path: Path) -> None:
    wanted = make_search(tmp_path, overrides=["data.validation=0", "evaluate.select=last"])
    with pytest.raises(FedlensError, match=r"set data\.validation above 0"):
        run_search(wanted, trials=1, start=Formula())


def test_the_default_space_gives_way_to_what_is_fixed_or_searched() -> None:
    config = compose("quickstart", [])
    assert [one.key for one in space(config, [], [])] == sorted(DEFAULT)
    fixed = space(config, ["train.lr=0.1", "seed=3"], ["train.optimizer.momentum=float:0:0.9"])
    assert [one.key for one in fixed] == [
        "train.optimizer.momentum", "train.optimizer.weight_decay", "train.schedule.name",
    ]  # fmt: skip
    (narrower,) = [o for o in space(config, [], ["train.lr=log:0.01:0.1"]) if o.key == "train.lr"]
    assert narrower.values == (0.01, 0.1)


@pytest.mark.parametrize(
    ("text", "kind", "values", "probes"),
    [
        ("train.lr=log:1e-4:1", "log", (1e-4, 1.0), [1e-4, 1e-2, 1.0]),
        ("train.optimizer.momentum=float:0:0.5", "float", (0.0, 0.5), [0.0, 0.25, 0.5]),
        ("train.epochs=int:1:8", "int", (1, 8), [1, 4, 8]),
        ("train.optimizer.nesterov=true,false", "choices", (True, False), [True, False]),
        ("train.clip_norm=null,1.5", "choices", (None, 1.5), [None, 1.5]),
        ("train.trainable=full,last_blocks:2", "choices", ("full", "last_blocks:2"),
         ["full", "last_blocks:2"]),
    ],
)  # fmt: skip
def test_a_space_is_read_and_written(text: str, kind: str, values: tuple, probes: list) -> None:
    key, _, words = text.partition("=")
    found = dimension(key, words)
    assert (found.kind, found.values) == (kind, values)
    assert found.probes() == pytest.approx(probes) if kind != "choices" else probes
    assert dimension(key, str(found)) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train.lrr=log:1:2", "did you mean 'train.lr'"),
        ("train.lr=log:0:1", "must start above 0"),
        ("train.lr=log:1:0.1", "must be below the second"),
        ("train.lr=float:1:1", "must be below the second"),
        ("train.lr=float:0:inf", "must be below the second"),
        ("train.lr=float:0", "with two numbers"),
        ("train.epochs=int:1.5:3", "with two numbers"),
        ("train.lr=0.1", "two or more values"),
        ("train.lr=", "two or more values"),
        ("train.lr=[1],2", "is not a value"),
        ("train.lr=float:0:1", "train.lr=0.0 must be positive"),
        ("train.optimizer.momentum=float:0:1", r"train.optimizer.momentum=1.0 must be in"),
        ("train.epochs=float:1:3", "could not be converted to Integer"),
        ("train.schedule.name=cosine,cosinus", "did you mean 'cosine'"),
        ("train=head,full", "is a group.*: search one of .*, such as train.trainable"),
        ("seed=1,2", "is not a training setting"),
        ("evaluate.test=true,false", "is not a training setting"),
        ("data.validation=0.1,0.2", "is not a training setting"),
        ("threads=1,2", "is not a training setting"),
    ],
)
def test_an_impossible_space_is_refused_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint) as caught:
        space(compose("quickstart", []), [], [text])
    assert "\n" not in str(caught.value)


def test_rows_are_searched_by_their_key() -> None:
    config = compose("quickstart_sparse", [])
    (rules,) = space(config, list(DEFAULT), ["sparse.rule=random,least_sensitive"])
    assert (rules.key, rules.values) == ("sparse.rule", ("random", "least_sensitive"))
    with pytest.raises(FedlensError, match="did you mean 'random'"):
        space(config, [], ["sparse.rule=randm,least_sensitive"])


def test_what_is_fixed_is_not_searched_too() -> None:
    with pytest.raises(FedlensError, match=r"train\.lr is both fixed and searched"):
        space(compose("quickstart", []), ["train.lr=0.1"], ["train.lr=log:0.1:1"])
