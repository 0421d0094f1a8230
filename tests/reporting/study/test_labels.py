from pathlib import Path
from typing import Any

import pytest

from fedlens.reporting.study import labels
from fedlens.reporting.study.runs import Method
from tests.reporting.worlds import ALONE, CENTRAL, NONIID, RIDGE, masked, methods_of, write_run


def method(root: Path, changes: dict[str, Any], *, trains: bool = True) -> Method:
    write_run(root, changes, trains=trains)
    return methods_of(root)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (CENTRAL, "central"),
        ({}, "IID"),
        (NONIID, "Nc=1"),
        ({"partition.name": "dirichlet", "partition.alpha": 0.1}, "Dirichlet 0.1"),
        ({"partition.name": "dirichlet", "partition.min_size": 9},
         "Dirichlet 0.3, at least 9 each"),
        ({"partition.name": "quantity", "partition.sigma": 2.0}, "sizes σ=2"),
    ],
)  # fmt: skip
def test_partitions_are_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert labels.partition(method(tmp_path, changes)) == said


def test_partitions_go_from_pooled_and_even_to_the_most_skewed(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = [
        CENTRAL,
        {},
        {"partition.name": "quantity", "partition.sigma": 1.0},
        {"partition.name": "dirichlet", "partition.alpha": 10.0},
        {"partition.name": "dirichlet", "partition.alpha": 0.1},
        {"partition.name": "classes", "partition.classes_per_client": 50},
        NONIID,
    ]
    for changes in reversed(told):
        write_run(tmp_path, changes)
    found = sorted(methods_of(tmp_path), key=labels.evenness)
    assert [labels.partition(m) for m in found] == [
        "central", "IID", "sizes σ=1", "Dirichlet 10", "Dirichlet 0.1", "Nc=50", "Nc=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "trains", "said"),
    [
        ({}, True, "everything, linear head, FedAvg, IID, J=4"),
        (CENTRAL, True, "everything, linear head, central"),
        ({"train.what": "head"}, True, "linear head only, FedAvg, IID, J=4"),
        ({"train.what": "last_blocks:2"}, True, "last 2 blocks, linear head, FedAvg, IID, J=4"),
        (RIDGE, True, "everything, ridge head frozen, FedAvg, IID, J=4"),
        ({"algorithm.server_lr": 2.0}, True,
         "everything, linear head, FedAvg, server step 2, IID, J=4"),
        ({"algorithm.name": "fedadam", "algorithm.server": "adam", "algorithm.server_lr": 0.01},
         True, "everything, linear head, FedAdam, IID, J=4"),
        (ALONE, False, "ridge head alone, FedAvg, IID"),
        ({**NONIID, **masked()}, True,
         "everything, linear head, density 0.1, least sensitive, FedAvg, Nc=1, J=4"),
        ({"algorithm.name": "fedprox"}, True, "everything, linear head, FedProx, IID, J=4"),
    ],
)  # fmt: skip
def test_a_method_in_one_line(
    changes: dict[str, Any], trains: bool, said: str, tmp_path: Path
) -> None:
    assert labels.described(method(tmp_path, changes, trains=trains)) == said


def test_what_a_table_varies_is_not_said_again(tmp_path: Path) -> None:
    found = method(tmp_path, masked("random", 0.05))
    assert labels.described(found, but=("rule", "partition", "steps")) == (
        "everything, linear head, density 0.05, FedAvg"
    )


def test_a_dense_method_has_no_rule_whatever_its_config_says(tmp_path: Path) -> None:
    found = method(tmp_path, {"sparse.rule": "random"})
    assert (labels.rule(found), labels.density(found), labels.kind(found)) == ("dense",) * 3


@pytest.mark.parametrize(
    ("rule", "needs"),
    [("least_sensitive", True), ("most_sensitive", True), ("lowest_magnitude", False),
     ("highest_magnitude", False), ("random", False)],
)  # fmt: skip
def test_rules_that_look_at_sensitivity_calibrate(rule: str, needs: bool, tmp_path: Path) -> None:
    assert labels.calibrates(method(tmp_path, masked(rule))) is needs


def test_a_schedule_is_said_with_its_warm_up(tmp_path: Path) -> None:
    found = method(tmp_path, {"train.schedule.name": "cosine", "train.schedule.warmup": 0.05})
    assert labels.schedule(found) == "cosine, warm-up 0.05"
