"""Every check passes on an honest study, and fails once its fact is falsified on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlens.config import compose
from fedlens.config.identity import run_name
from fedlens.reporting.audit.checks import audit
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Check
from fedlens.reporting.study.questions import comparisons, questions
from fedlens.reporting.study.runs import Study
from tests.reporting import run_records
from tests.reporting.run_records import CENTRAL, NONIID, RIDGE, edit, masked, study_of, write_run

CHOSEN = "Nothing was chosen on test data"
DENSITY = "Masks are compared at equal density"
BUDGET = "Methods are compared at equal budget"
TUNED = "Methods were tuned alike"
NUMBERS = "Every number comes from a run"
INPUTS = "All runs of a setting used the same data and weights"
SEEDS = "Differences are paired by seed"
CODE = "The code is on record"


def honest(root: Path) -> Path:
    """Two rules beside dense training, each with two learning rates and two seeds, and an α.

    The run that is returned stands in the mask-rule table and has the analysis.
    """
    found = None
    for seed in (0, 1):
        for changes in ({}, masked("random"), masked()):
            for lr, validation in ((0.1, 0.5), (0.2, 0.4)):
                run = write_run(
                    root, {**RIDGE, **changes, "train.lr": lr}, seed=seed, validation=validation,
                    test=0.5 + 0.01 * seed, name=f"{changes.get('sparse.rule.name')}-{lr}-s{seed}",
                )  # fmt: skip
                if changes and lr == 0.1 and not seed:
                    found = run
    write_run(root, CENTRAL, name="central")
    write_run(root, run_records.HEAD_ONLY, name="alone", trains=False)
    assert found is not None
    run_records.write_alpha(found)
    return found


def checks(root: Path) -> dict[str, Check]:
    return audited(study_of(root))


def audited(study: Study) -> dict[str, Check]:
    tables = [table for methods in study.settings.values() for table in comparisons(methods)]
    return {check.title: check for check in audit(study, tables, questions())}


def test_an_honest_study_passes_every_check(tmp_path: Path) -> None:
    honest(tmp_path)
    found = checks(tmp_path)
    assert set(found) == {CHOSEN, DENSITY, BUDGET, TUNED, NUMBERS, INPUTS, SEEDS, CODE}
    assert [check.violations for check in found.values()] == [[]] * 8
    assert found[CHOSEN].scope.startswith("14 runs, 1 analysis with a choice,")
    assert found[DENSITY].scope.startswith("6 masks in 2 tables")
    assert found[TUNED].remarks == [
        "Central and federated training, dense and sparse, dense: candidates by row: central 1, "
        "FedAvg, IID 2"
    ]


def test_a_check_that_checked_nothing_does_not_pass(tmp_path: Path) -> None:
    write_run(tmp_path, CENTRAL, name="central")
    found = checks(tmp_path)
    outcomes = {title: check.outcome for title, check in found.items()}
    assert {outcomes[title] for title in (DENSITY, BUDGET, SEEDS)} == {"nothing to check"}
    assert {outcomes[title] for title in (CHOSEN, NUMBERS, INPUTS, CODE)} == {"PASS"}
    assert captions.audited(list(found.values())) == "4 checks passed, 4 had nothing to check"


def result(key: str, value: Any) -> Callable[[Path], None]:
    return lambda run: edit(run / "result.json", key, value)


def manifest(key: str, value: Any) -> Callable[[Path], None]:
    return lambda run: edit(run / "manifest.json", key, value)


def choice(key: str, value: Any) -> Callable[[Path], None]:
    """In both places, as somebody who cheats would."""

    def falsify(run: Path) -> None:
        edit(run / "choice.json", key, value)
        edit(run / "result.json", f"choice.{key}", value)

    return falsify


def alpha(key: str, value: Any) -> Callable[[Path], None]:
    return lambda run: edit(run / "arithmetic" / "alpha-pretrained" / "record.json", key, value)


def another_round(run: Path) -> None:
    """Round 1, whole with its validation accuracy, though round 2 was better."""
    choice("unit", 1)(run)
    result("validation", run_records.journal(run)[0]["validation"])(run)


def another_round_called_the_last(run: Path) -> None:
    another_round(run)
    choice("chosen_on", "last")(run)


def one_round_fewer(run: Path) -> None:
    run_records.write_journal(run, run_records.journal(run)[:1])
    another_round(run)
    result("units", 1)(run)


def fewer_clients(run: Path) -> None:
    records = run_records.journal(run)
    for record in records:
        record["participants"] = [0]
    run_records.write_journal(run, records)


def better_validation_in_the_journal(run: Path) -> None:
    records = run_records.journal(run)
    records[0]["validation"]["top1"] = 0.99
    run_records.write_journal(run, records)


def longer_than_its_journal(run: Path) -> None:
    result("units", 9)(run)


def cut_to_the_same_end(run: Path) -> None:
    """A round is missing in the middle of the journal, which still ends where it should."""
    records = run_records.journal(run)
    run_records.write_journal(run, records[1:])


FALSIFIED: list[tuple[str, Callable[[Path], None], str]] = [
    (CHOSEN, another_round, "round 2 was the best on validation, but round 1 was tested"),
    (CHOSEN, another_round_called_the_last, "round 2 was the best"),
    (CHOSEN, choice("chosen_on", "test"), "chosen on test"),
    (CHOSEN, result("choice.parameters", "other"), "choices in choice.json and result.json differ"),
    (CHOSEN, lambda run: (run / "choice.json").unlink(), "choice was not recorded"),
    (CHOSEN, better_validation_in_the_journal, "round 1 was the best"),
    (CHOSEN, result("validation.top1", 0.9), "differ in validation accuracy"),
    (CHOSEN, alpha("chosen", 2), "alpha is not the best on validation"),
    (CHOSEN, alpha("choice.chosen_on", "test"), "alpha was chosen on test"),
    (DENSITY, result("facts.weights_trained", 99), "99 of 1000 weights were trained"),
    (DENSITY, result("facts.weights_trained", 99), "unequal masks"),
    (DENSITY, lambda run: edit(run / "masks.json", "all.trained", 99), "mask and result differ"),
    (BUDGET, one_round_fewer, "1 of 2 rounds"),
    (BUDGET, one_round_fewer, "4 steps"),
    (BUDGET, cut_to_the_same_end, "1 of 2 rounds"),
    (BUDGET, fewer_clients, "1 clients"),
    (NUMBERS, result("test.top1", 0.9), "not the mean over classes"),
    (NUMBERS, result("test.top1", 0.9), "alpha analysis has a different test accuracy"),
    (NUMBERS, longer_than_its_journal, "end at different units"),
    (NUMBERS, manifest("seed", 5), "manifest and its config differ in seed"),
    (NUMBERS, result("mask_rule", "magic"), "result and its config differ in mask_rule"),
    (NUMBERS, result("partition.name", "classes"), "differ in partition"),
    (INPUTS, manifest("inputs.data", "other"), "2 different data"),
    (INPUTS, manifest("inputs.weights", "other"), "2 different weights"),
]  # fmt: skip


@pytest.mark.parametrize(("title", "falsify", "said"), FALSIFIED)
def test_a_falsified_record_is_found(
    title: str, falsify: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    run = honest(tmp_path)
    falsify(run)
    found = checks(tmp_path)[title]
    assert not found.passed
    assert any(said in violation for violation in found.violations), found.violations


def test_a_number_that_changes_after_it_was_read_is_found(tmp_path: Path) -> None:
    run = honest(tmp_path)
    study = study_of(tmp_path)
    result("test.top1", 0.9)(run)
    found = audited(study)[NUMBERS]
    assert any("is not the mean of its runs" in violation for violation in found.violations)


def test_a_seed_counts_once(tmp_path: Path) -> None:
    honest(tmp_path)
    changes = {**RIDGE, **masked("random"), "train.lr": 0.1, "run.name": "again"}
    write_run(tmp_path, changes, seed=0, name="again")
    assert "have the same seed" in checks(tmp_path)[SEEDS].violations[0]


def test_seeds_that_ended_in_the_same_parameters_are_one(tmp_path: Path) -> None:
    honest(tmp_path)
    first, second = tmp_path / "random-0.1-s0", tmp_path / "random-0.1-s1"
    choice("parameters", run_records.load(first / "choice.json")["parameters"])(second)
    assert "ended in the same parameters" in checks(tmp_path)[SEEDS].violations[0]


def test_code_that_nothing_names_is_found(tmp_path: Path) -> None:
    run = honest(tmp_path)
    session = run_records.load(run / "manifest.json")["sessions"][0]
    manifest("sessions", [{**session, "git": None}])(run)
    found = checks(tmp_path)[CODE]
    assert found.passed
    assert found.remarks == ["1 run from no commit"]
    manifest("sessions", [{**session, "git": None, "versions": {"torch": "2", "timm": "1"}}])(run)
    assert not checks(tmp_path)[CODE].passed


def test_other_versions_and_a_changed_tree_are_remarked(tmp_path: Path) -> None:
    run = honest(tmp_path)
    session = run_records.load(run / "manifest.json")["sessions"][0]
    versions = {**session["versions"], "torch": "3"}
    manifest("sessions", [{**session, "git": "abc+changes", "versions": versions}])(run)
    assert checks(tmp_path)[CODE].remarks == [
        "1 run from abc+changes", "2 versions of torch",
    ]  # fmt: skip


def rules(root: Path, rates: dict[str, list[float]]) -> None:
    for rule, tried in rates.items():
        for lr in tried:
            write_run(root, {**({} if rule == "dense" else masked(rule)), "train.lr": lr})


def test_untuned_against_tuned_is_a_violation(tmp_path: Path) -> None:
    rules(tmp_path, {"dense": [0.1], "random": [0.1, 0.2], "least_sensitive": [0.1, 0.2]})
    found = checks(tmp_path)[TUNED]
    assert any("dense 1, least sensitive 2, random 2" in said for said in found.violations)


def test_tuned_unequally_is_remarked(tmp_path: Path) -> None:
    rules(tmp_path, {"dense": [0.1, 0.2], "random": [0.1, 0.2, 0.3], "most_sensitive": [0.1, 0.2]})
    found = checks(tmp_path)[TUNED]
    assert found.passed
    assert any("most sensitive 2, random 3" in said for said in found.remarks)


def test_a_better_rate_with_fewer_seeds_is_remarked(tmp_path: Path) -> None:
    for seed in (0, 1):
        for changes in ({}, NONIID):
            write_run(tmp_path, {**changes, "train.lr": 0.1}, seed=seed, validation=0.4)
    for changes, validation in (({}, 0.9), (NONIID, 0.3)):
        write_run(tmp_path, {**changes, "train.lr": 0.2}, validation=validation)
    said = [r for r in checks(tmp_path)[TUNED].remarks if r.startswith("Heterogeneity")]
    assert said == [
        "Heterogeneity, IID / J=4: a method with fewer seeds is better on validation over the "
        "shared seeds"
    ]


def test_a_choice_without_validation_is_a_violation(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for changes in ({}, NONIID):
            run = write_run(tmp_path, {**changes, "train.lr": lr})
            records = run_records.journal(run)
            for record in records:
                del record["validation"]
            run_records.write_journal(run, records)
            edit(run / "result.json", "validation", None)
            choice("chosen_on", "last")(run)
    found = checks(tmp_path)
    assert found[CHOSEN].passed
    assert any("2 methods without a validation accuracy" in v for v in found[TUNED].violations)


def test_an_early_stop_is_remarked_where_it_makes_budgets_differ(tmp_path: Path) -> None:
    told_so = {"train.early_stopping": 1}
    write_run(tmp_path, told_so)
    run = write_run(tmp_path, {**told_so, **NONIID})
    one_round_fewer(run)
    found = checks(tmp_path)[BUDGET]
    assert found.passed
    assert len(found.remarks) == 1


def test_the_last_round_may_round_a_budget_up(tmp_path: Path) -> None:
    """Nine steps are three rounds of four, or two of eight: 12 and 16 steps."""
    for steps in (4, 8):
        told_so = {"federated.local_steps": steps, "federated.local_step_budget": 9}
        write_run(tmp_path, told_so)
    found = checks(tmp_path)[BUDGET]
    assert found.passed
    assert "12 steps" in found.remarks[0]
    assert "16 steps" in found.remarks[0]


def test_the_last_parameters_are_those_of_the_last_round(tmp_path: Path) -> None:
    for changes in ({}, NONIID):
        run = write_run(tmp_path, {**changes, "evaluate.select": "last"}, validation=[0.6, 0.5])
        last = run_records.journal(run)[1]["validation"]
        choice("unit", 2)(run)
        choice("chosen_on", "last")(run)
        result("validation", last)(run)
    assert checks(tmp_path)[CHOSEN].passed
    choice("unit", 1)(run)
    found = checks(tmp_path)[CHOSEN].violations
    assert any("round 2 was the last, but round 1 was tested" in said for said in found)


def test_a_tie_on_validation_goes_to_the_earlier_round(tmp_path: Path) -> None:
    run = write_run(tmp_path, validation=[0.5, 0.5])
    assert checks(tmp_path)[CHOSEN].passed
    choice("unit", 2)(run)
    assert not checks(tmp_path)[CHOSEN].passed


def test_a_test_curve_is_remarked(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="curious")
    (run / "test_curve.jsonl").write_text('{"round": 1}\n', encoding="utf-8")
    found = checks(tmp_path)[CHOSEN]
    assert found.passed
    assert "curious recorded a test curve" in found.remarks[0]


def test_classes_of_other_sizes_are_not_held_against_a_result(tmp_path: Path) -> None:
    """Of 3 images one class has two; 2 of 3 are right, the mean over classes is 3 in 4."""
    run = write_run(tmp_path)
    edit(run / "result.json", "test", {"top1": 2 / 3, "per_class": [1.0, 0.5], "count": 3})
    assert checks(tmp_path)[NUMBERS].passed


def test_single_seeds_and_partly_shared_ones_are_remarked(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, seed=seed)
    write_run(tmp_path, NONIID, seed=0)
    found = checks(tmp_path)[SEEDS]
    assert found.passed
    assert "Heterogeneity, J=4: Nc=1 and IID share 1 of 2 seeds" in found.remarks
    assert any("from one seed" in said for said in found.remarks)


def test_runs_that_are_not_finished_are_remarked(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    (write_run(tmp_path, seed=1) / "result.json").unlink()
    assert "unfinished and not in any table: 1 run" in checks(tmp_path)[CODE].remarks


def test_a_config_is_the_one_its_run_was_named_by(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    rewrite(written / "config.yaml", lambda config: config["run"].update(name=None))
    named = written.rename(tmp_path / run_name(compose.load(written / "config.yaml")))
    edit(named / "manifest.json", "name", named.name)
    assert checks(tmp_path)[NUMBERS].passed
    rewrite(named / "config.yaml", lambda config: config["train"].update(lr=0.5))
    assert checks(tmp_path)[NUMBERS].violations == [
        f"{named.name}: its name does not belong to its config"
    ]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def test_an_untrained_start_that_was_best_is_told(tmp_path: Path) -> None:
    edit(write_run(tmp_path, RIDGE) / "result.json", "choice.unit", 0)
    write_run(tmp_path, {**RIDGE, **masked()})
    remarks = checks(tmp_path)[NUMBERS].remarks
    assert remarks
    assert all("the best on validation in 1 of 1 seed" in said for said in remarks)


def test_copies_that_differ_in_what_they_keep_are_one_candidate(tmp_path: Path) -> None:
    for rule in ("least_sensitive", "random"):
        write_run(tmp_path, masked(rule))
    write_run(tmp_path, {**masked(), "federated.keep_updates": 1, "experiment": "another"})
    found = checks(tmp_path)[TUNED]
    assert found.violations == []
    assert any("each method was run with one learning rate only" in said for said in found.remarks)


def test_inputs_without_a_hash_are_told(tmp_path: Path) -> None:
    edit(write_run(tmp_path) / "manifest.json", "inputs", {})
    assert len(checks(tmp_path)[INPUTS].violations) == 2
