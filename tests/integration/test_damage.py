"""Files of an interrupted run that were changed by a bit or a number: noticed, and said so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.config.compose import compose
from fedlens.errors import FedlensError
from fedlens.experiments.run import resume, start
from fedlens.files import read_json, write_json
from fedlens.store.analysis_records import require_kept_rounds
from fedlens.store.client_updates import read_round
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, facts, interrupted_at

OPTIONS = [
    *TINY, *FEDERATED, *ON_FEATURES, "algorithm=scaffold", "federated.keep_updates=2",
    "federated.rounds=4", "federated.participation=1", "evaluate.test_curve=true", "run.name=it",
]  # fmt: skip

Damage = Callable[[RunFolder], None]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunFolder]:
    """What an undisturbed run gives, and the same run interrupted in its last round."""
    root = tmp_path_factory.mktemp("runs")
    expected = facts(start(compose("quickstart", [*OPTIONS, f"run.root={root / 'whole'}"])))
    config = compose("quickstart", [*OPTIONS, f"run.root={root / 'cut'}"])
    with pytest.MonkeyPatch.context() as patch:
        assert interrupted_at(config, 24, patch)
    folder = RunFolder(root / "cut" / "it")
    assert len(list(folder.checkpoints.iterdir())) >= 2
    return expected, folder


def flip(path: Path, *, at: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def newest(run: RunFolder) -> Path:
    return max(run.checkpoints.iterdir())


def skip_rounds(run: RunFolder) -> None:
    """As in the report of a run that skipped two rounds."""
    path = newest(run) / "state.json"
    header = read_json(path)
    header["state"]["position"]["done"] += 1
    write_json(path, header)


def newest_client(run: RunFolder) -> Path:
    return max((run.path / "clients").iterdir(), key=lambda path: path.name.rpartition("-")[2])


def newest_update(run: RunFolder) -> Path:
    rounds = read_json(newest(run) / "hashes.json")["run"]
    return run.path / max(name for name in rounds if name.startswith("updates/"))


NOTICED: dict[str, Damage] = {
    "done": skip_rounds,
    "state": lambda run: flip(newest(run) / "state.json"),
    "tensors": lambda run: flip(newest(run) / "tensors.safetensors"),
    "hashes": lambda run: flip(newest(run) / "hashes.json"),
    "no hashes": lambda run: (newest(run) / "hashes.json").unlink(),
    "no state": lambda run: (newest(run) / "state.json").unlink(),
    "client": lambda run: flip(newest_client(run)),
    "update": lambda run: flip(newest_update(run)),
    "metrics": lambda run: flip(run.journal("metrics").path, at=0.1),
    "test curve": lambda run: flip(run.journal("test_curve").path, at=0.7),
    "metrics are a folder": lambda run: (
        run.journal("metrics").path.unlink(),
        run.journal("metrics").path.mkdir(),
    )[1],
}
HARMLESS: dict[str, Damage] = {
    "clock": lambda run: flip(run.journal("timings").path),
    "no clock": lambda run: run.journal("timings").path.unlink(),
    "clock is a folder": lambda run: (
        run.journal("timings").path.unlink(),
        run.journal("timings").path.mkdir(),
    )[1],
    "picture": lambda run: (run.path / "partition.png").mkdir(),
    "failure": lambda run: (run.path / "failure.json").mkdir(),
    "half a figure": lambda run: (run.path / ".partial-partition.png-0").write_text("x") and None,
}


@pytest.mark.parametrize("how", [*NOTICED, *HARMLESS])
def test_damage_does_not_change_the_result(how: str, cut: Any, tmp_path: Path) -> None:
    expected, folder = cut
    shutil.copytree(folder.path, tmp_path / "it")
    run = RunFolder(tmp_path / "it")
    before = len(run.log.read_text())
    (NOTICED | HARMLESS)[how](run)
    assert facts(resume(run)) == expected
    assert ("using an earlier one" in run.log.read_text()[before:]) == (how in NOTICED)
    assert not list(run.path.glob(".partial*"))


SHAPES: dict[str, list[Any]] = {
    "config.yaml": [3, "word", [1], {}],
    "manifest.json": [
        None, {}, {"x": 1}, {"inputs": 3, "sessions": []}, {"inputs": {}, "sessions": 3},
    ],
    "choice.json": [{}, {"x": 1}],
}  # fmt: skip


@pytest.mark.parametrize("file", SHAPES)
def test_a_record_of_another_shape_is_refused(file: str, cut: Any, tmp_path: Path) -> None:
    """None: the file is lost."""
    _, folder = cut
    shutil.copytree(folder.path, tmp_path / "it")
    run = RunFolder(tmp_path / "it")
    for content in SHAPES[file]:
        if content is None:
            (run.path / file).unlink()
        else:
            write_json(run.path / file, content)
        with pytest.raises(FedlensError, match=str(run.path)) as caught:
            resume(run)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.yaml", "manifest.json", "choice.json"])
def test_a_record_that_decides_the_run_is_refused(file: str, cut: Any, tmp_path: Path) -> None:
    _, folder = cut
    shutil.copytree(folder.path, tmp_path / "it")
    run = RunFolder(tmp_path / "it")
    path = run.path / file
    if file == "config.yaml":
        path.write_text(path.read_text().replace("lr: 0.05", "lr: 0.06"))
    elif file == "choice.json":
        run.write("choice", {"parameters": "1f", "chosen_on": "last", "unit": 1})
        flip(path, at=0.2)
    else:
        flip(path, at=0.5)
    with pytest.raises(FedlensError, match=file) as caught:
        resume(run)
    assert "\n" not in str(caught.value)


def test_a_result_is_whole_or_written_again(cut: Any, tmp_path: Path) -> None:
    expected, folder = cut
    shutil.copytree(folder.path, tmp_path / "it")
    run = resume(RunFolder(tmp_path / "it"))
    path = run.path / "result.json"
    for content in ("", "[]", path.read_text().replace('"units": 4', '"units": 5')):
        path.write_text(content)
        assert run.state() == "interrupted"
        assert facts(resume(run)) == expected
        assert run.state() == "finished"
    assert "result.json is damaged" in run.log.read_text()


def test_damaged_updates_of_a_finished_run_are_refused(cut: Any, tmp_path: Path) -> None:
    _, folder = cut
    shutil.copytree(folder.path, tmp_path / "it")
    run = resume(RunFolder(tmp_path / "it"))
    assert require_kept_rounds(run) == [3, 4]
    file = run.updates / "round-000003" / "client-000001.safetensors"
    assert 1 in read_round(run.updates, 3).clients
    content = file.read_bytes()
    flip(file)
    with pytest.raises(FedlensError, match=r"round 3 of it .*client-000001.*damaged"):
        read_round(run.updates, 3)
    file.unlink()
    with pytest.raises(FedlensError, match=r"round 3 of it .*client-000001.*damaged"):
        read_round(run.updates, 3)
    file.write_bytes(content)
    shutil.copy(file, file.with_name("client-000099.safetensors"))
    with pytest.raises(FedlensError, match=r"client-000099.*is not in its checkpoint"):
        read_round(run.updates, 3)
    shutil.rmtree(file.parent)
    with pytest.raises(FedlensError, match="round-000003 is lost"):
        require_kept_rounds(run)
    flip(newest(run) / "hashes.json")
    with pytest.raises(FedlensError, match=r"cannot be checked") as caught:
        require_kept_rounds(run)
    assert "\n" not in str(caught.value)
    assert json.loads((run.path / "result.json").read_text())["units"] == 4
