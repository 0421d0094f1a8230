from pathlib import Path
from typing import Any

import pytest

from fedlens.reporting.study import labels
from fedlens.reporting.study.runs import Method
from tests.reporting.run_records import (
    CENTRAL,
    FEDPROX,
    HEAD_ONLY,
    NONIID,
    RIDGE,
    masked,
    methods_of,
    write_run,
)


def method(root: Path, changes: dict[str, Any], *, trains: bool = True) -> Method:
    write_run(root, changes, trains=trains)
    return methods_of(root)[0]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        (CENTRAL, "central"),
        ({}, "IID"),
        (NONIID, "Nc=1"),
        ({"partition.name": "dirichlet", "partition.alpha": 0.1}, "Dirichlet α=0.1"),
        ({"partition.name": "dirichlet", "partition.min_size": 9}, "Dirichlet α=0.3, min size 9"),
        ({"partition.name": "quantity", "partition.sigma": 2.0}, "log-normal sizes σ=2"),
    ],
)  # fmt: skip
def test_partitions_have_labels(changes: dict[str, Any], label: str, tmp_path: Path) -> None:
    assert labels.partition(method(tmp_path, changes)) == label


def test_partitions_go_from_pooled_and_even_to_the_most_skewed(tmp_path: Path) -> None:
    partitions: list[dict[str, Any]] = [
        CENTRAL,
        {},
        {"partition.name": "quantity", "partition.sigma": 1.0},
        {"partition.name": "dirichlet", "partition.alpha": 10.0},
        {"partition.name": "dirichlet", "partition.alpha": 0.1},
        {"partition.name": "classes", "partition.classes_per_client": 50},
        NONIID,
    ]
    for changes in reversed(partitions):
        write_run(tmp_path, changes)
    found = sorted(methods_of(tmp_path), key=labels.partition_order)
    assert [labels.partition(m) for m in found] == [
        "central", "IID", "log-normal sizes σ=1", "Dirichlet α=10", "Nc=50", "Dirichlet α=0.1",
        "Nc=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "trains", "label"),
    [
        ({}, True, "full fine-tuning, linear head trained jointly, FedAvg, IID, J=4"),
        (CENTRAL, True, "full fine-tuning, linear head trained jointly, central"),
        ({"train.trainable.name": "head"}, True,
         "linear head trained, backbone frozen, FedAvg, IID, J=4"),
        ({"train.trainable.name": "last_blocks", "train.trainable.count": 2}, True,
         "last 2 blocks, linear head trained jointly, FedAvg, IID, J=4"),
        (RIDGE, True, "full fine-tuning, ridge head frozen, FedAvg, IID, J=4"),
        ({"algorithm.server.lr": 2.0}, True,
         "full fine-tuning, linear head trained jointly, FedAvg, server learning rate 2, IID, J=4"),
        ({"algorithm.server.name": "adam", "algorithm.server.lr": 0.01},
         True, "full fine-tuning, linear head trained jointly, FedAdam, IID, J=4"),
        (HEAD_ONLY, False, "ridge head, no fine-tuning, FedAvg, IID"),
        ({**NONIID, **masked()}, True,
         "full fine-tuning, linear head trained jointly, density 0.1, least sensitive, FedAvg, "
         "Nc=1, J=4"),
        (FEDPROX, True, "full fine-tuning, linear head trained jointly, FedProx μ=0.1, IID, J=4"),
    ],
)  # fmt: skip
def test_a_method_in_one_line(
    changes: dict[str, Any], trains: bool, label: str, tmp_path: Path
) -> None:
    assert labels.described(method(tmp_path, changes, trains=trains)) == label


def test_what_a_table_varies_is_not_said_again(tmp_path: Path) -> None:
    found = method(tmp_path, masked("random", 0.05))
    assert labels.described(found, without=("rule", "partition", "steps")) == (
        "full fine-tuning, linear head trained jointly, density 0.05, FedAvg"
    )


def test_a_dense_method_has_no_rule_whatever_its_config_says(tmp_path: Path) -> None:
    found = method(tmp_path, {"sparse.rule.name": "random"})
    assert (labels.rule(found), labels.density(found), labels.dense_or_sparse(found)) == (
        "dense",
    ) * 3


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
