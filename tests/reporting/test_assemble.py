import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from fedlens.config import compose
from fedlens.errors import FedlensError
from fedlens.reporting.assemble import content
from fedlens.reporting.study.content import About, Chapter, Content
from fedlens.reporting.study.runs import read
from tests.reporting.run_records import (
    CENTRAL,
    HEAD_ONLY,
    NONIID,
    RIDGE,
    masked,
    study_of,
    write_alpha,
    write_run,
)


def whole(root: Path) -> list[Path]:
    """All kinds of runs, in two settings."""
    made = []
    for setting in ({}, {"backbone.resolution": 64}):
        for seed in (0, 1):
            for changes in (CENTRAL, {}, NONIID, masked("random"), {**masked(), **NONIID}):
                made.append(write_run(root, {**changes, **setting}, seed=seed))  # noqa: PERF401
            made.append(write_run(root, {**HEAD_ONLY, **setting}, seed=seed, trains=False))
        write_alpha(made[-2])
    return made


def of(root: Path, about: About | None = None) -> Content:
    return content(study_of(root), about or About())


def only(root: Path) -> Chapter:
    (chapter,) = of(root).chapters
    return chapter


@pytest.mark.slow
def test_shuffled_paths_give_the_same_content(tmp_path: Path) -> None:
    places = whole(tmp_path)
    first = content(read(places), About())
    random.Random(1).shuffle(places)
    assert content(read(places), About()) == first
    assert content(read([tmp_path]), About()) == first


@pytest.mark.slow
def test_content_is_json_without_a_place_of_this_machine(tmp_path: Path) -> None:
    whole(tmp_path)
    text = json.dumps(asdict(of(tmp_path)), allow_nan=False)
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_a_study_reads_the_same_from_another_folder(tmp_path: Path) -> None:
    whole(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert of(tmp_path / "there") == of(tmp_path / "here")


@pytest.mark.slow
def test_names_of_files_are_unique_over_all_settings(tmp_path: Path) -> None:
    whole(tmp_path)
    found = of(tmp_path)
    assert len(found.chapters) == 2
    names: list[str] = []
    for chapter in found.chapters:
        assert chapter.headline is not None
        names += [chapter.headline.name, *(grid.name for grid in chapter.grids)]
        for group in (chapter.masks, chapter.alphas, chapter.findings, chapter.partitions):
            names += [one.name for one in group]
    assert len(names) == len(set(names)) > 10


@pytest.mark.slow
def test_curves_carry_the_name_of_their_table(tmp_path: Path) -> None:
    whole(tmp_path)
    for chapter in of(tmp_path).chapters:
        assert chapter.headline is not None
        grids = {chapter.headline.name, *(grid.name for grid in chapter.grids)}
        assert {one.name for one in chapter.curves} <= grids


def test_a_run_is_used_where_a_cell_names_it(tmp_path: Path) -> None:
    for changes in ({}, NONIID):
        write_run(tmp_path, {**changes, "train.lr": 0.1}, validation=0.6)
    lost = write_run(tmp_path, {"train.lr": 0.2}, validation=0.5)
    found = of(tmp_path)
    assert [run.name for run in found.runs if not run.used] == [lost.name]
    assert len(found.runs) == 3


def test_provenance_tells_where_a_number_comes_from(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"train.lr": 0.25}, seed=3, test=0.5, validation=0.4)
    (found,) = of(tmp_path).runs
    assert (found.name, found.seed, found.commit) == (run.name, 3, "c" * 8)
    assert (found.test, found.validation) == (50.0, pytest.approx(40.0))
    assert found.chosen == "round 2, chosen on validation"
    assert found.parameters == f"digest of {run.name}"
    assert found.inputs == {"data": "d" * 8, "weights": "w" * 8}


def test_the_command_gives_the_config_again(tmp_path: Path) -> None:
    changes = {"train.lr": 0.25, "partition.name": "dirichlet", "threads": 2, **masked("random")}
    run = write_run(tmp_path, changes, seed=3)
    (found,) = of(tmp_path).runs
    told = found.command.split()
    assert told[:3] == ["fedlens", "run", "quickstart_fedavg"]
    again = compose.compose(told[2], told[3:])
    assert found.command == " ".join(compose.command(compose.load(run / "config.yaml")))
    assert (again.train.lr, again.partition.name, again.seed) == (0.25, "dirichlet", 3)
    assert again.sparse.rule.name == "random"


@pytest.mark.parametrize(
    ("key", "value"), [("experiment", "bygone"), ("train.bygone", 1), ("train.lr", -1.0)]
)
def test_a_config_this_version_does_not_know_has_the_words_that_made_it(
    key: str, value: object, tmp_path: Path
) -> None:
    write_run(tmp_path, {key: value})
    assert [run.command for run in of(tmp_path).runs] == ["fedlens run it"]


def test_masks_are_shown_once_each(tmp_path: Path) -> None:
    """Learning rates share a mask; rules and densities do not."""
    for changes in (masked(), {**masked(), "train.lr": 9.0}, masked("random"), masked(density=0.5)):
        write_run(tmp_path, changes)
    found = only(tmp_path).masks
    assert {(one.label, one.trained, one.total) for one in found} == {
        ("least sensitive, density 0.1, 4 rounds", 100, 1000),
        ("random, density 0.1", 100, 1000),
        ("least sensitive, density 0.5, 4 rounds", 500, 1000),
    }
    assert len(found) == 3
    assert found[0].layers == ["block 0", "block 1"]
    assert [[cell is None for cell in row] for row in found[0].density] == [
        [False, True], [True, False],
    ]  # fmt: skip


def test_an_alpha_curve_is_in_percent_beside_the_run_as_trained(tmp_path: Path) -> None:
    write_alpha(write_run(tmp_path, test=0.5))
    (found,) = only(tmp_path).alphas
    assert found.alphas == [0.0, 1.0, 2.0]
    assert found.accuracy == pytest.approx([40.0, 60.0, 50.0])
    assert (found.chosen, found.test, found.as_trained) == (1.0, 61.0, 50.0)
    assert found.label.endswith("seed 0")


def test_partitions_are_pictured_once_from_even_to_skewed(tmp_path: Path) -> None:
    for changes in (NONIID, {}, {"train.lr": 9.0}, CENTRAL):
        write_run(tmp_path, changes)
    assert [one.label for one in only(tmp_path).partitions] == ["IID", "Nc=1"]


def test_facts_are_of_methods_that_they_say_something_of(tmp_path: Path) -> None:
    """The head alone takes no step, whatever its config says of steps and batches."""
    write_run(tmp_path, {"train.batch_size": 8})
    write_run(tmp_path, {**CENTRAL, "train.batch_size": 16, "federated.local_steps": 99})
    idle = {"train.batch_size": 32, "federated.local_steps": 77, "train.optimizer.momentum": 0.1}
    write_run(tmp_path, {**HEAD_ONLY, **idle}, trains=False)
    write_run(tmp_path, {**RIDGE, **masked("random"), "sparse.rounds": 7, "train.batch_size": 8})
    found = only(tmp_path).facts
    assert found["batch_size"] == [8, 16]
    assert found["local_steps"] == [4]
    assert found["momentum"] == [0.9]
    assert found["epochs"] == [2]
    assert (found["density"], found["calibration_rounds"]) == ([0.1], [])
    assert (found["clients"], found["seeds"]) == ([10], [0])


def test_the_study_goes_on_without_chapters_it_has_no_runs_for(tmp_path: Path) -> None:
    write_run(tmp_path, HEAD_ONLY, trains=False)
    chapter = only(tmp_path)
    assert chapter.headline is None
    assert (chapter.grids, chapter.curves, chapter.masks, chapter.alphas) == ([], [], [], [])


def test_unfinished_runs_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0)
    (write_run(tmp_path, seed=1, name="begun") / "result.json").unlink()
    assert of(tmp_path).unfinished == {"begun": "interrupted"}


def test_a_cut_mask_record_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, masked(), name="the_broken_one")
    (run / "masks.json").write_text("{", encoding="utf-8")
    with pytest.raises(FedlensError, match="the_broken_one"):
        of(tmp_path)
