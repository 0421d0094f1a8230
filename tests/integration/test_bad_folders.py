"""A finished run, damaged in a few hundred ways: every command that reads it names the run."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlens import cli
from fedlens.config.compose import compose
from fedlens.errors import FedlensError
from fedlens.experiments.run import start
from fedlens.files import TEMPORARY
from fedlens.reporting.figures import analyses
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY

NAME = "the-damaged-one"
OPTIONS = [
    *TINY, *FEDERATED, "data.train_per_class=2", "data.test_per_class=1", "federated.rounds=1",
    "federated.keep_updates=1", "head=ridge", "sparse.density=0.1", "sparse.rule=random",
    "evaluate.select=last", f"run.name={NAME}",
]  # fmt: skip
KINDS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "a list": b"[1, 2]\n",
    "an empty list": b"[]\n",
    "an empty object": b"{}\n",
    "a number": b"3\n",
    "a word": b'"word"\n',
    "null": b"null\n",
    "not UTF-8": b"\xff\xfe\x00\x01\n",
    "a list of lists": b"[" * 10**4 + b"]" * 10**4 + b"\n",
    "nested": b'{"a": ' * 200 + b"1" + b"}" * 200 + b"\n",
    "nested without an end": b'{"a": ' * 10**5,
}
CUTS = (0.3, 0.99)
BITS = 4  # of each file, drawn at random


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    return start(compose("quickstart", [*OPTIONS, f"run.root={root}"]))


@pytest.fixture
def run(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The run with an analysis on record; writing, which takes longest, is left out."""
    monkeypatch.setattr(analyses, "draw", lambda record, path: None)
    monkeypatch.setattr("fedlens.reporting.report.report.write", lambda *args: None)
    monkeypatch.setattr("fedlens.reporting.report.report.figures", lambda *args: None)
    monkeypatch.setattr("fedlens.reporting.report.page", lambda *args: "")
    monkeypatch.setattr("fedlens.reporting.report.paper.write", lambda *args: None)
    monkeypatch.setattr("fedlens.store.export.pack", lambda files, archive: None)
    alpha(finished)
    return finished


def alpha(run: RunFolder) -> None:
    cli.arithmetic.alpha(NAME, alphas="0,1", root=run.path.parent)


Damage = Callable[[Path], None]


def written(content: bytes | None) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        if content is not None:
            path.write_bytes(content)

    return damage


def cut(share: float) -> Damage:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return damage


def flipped(draw: random.Random) -> Damage:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes() or b" ")
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)

    return damage


def folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def ways() -> Iterator[tuple[str, Damage]]:
    draw = random.Random(0)
    yield from ((kind, written(content)) for kind, content in KINDS.items())
    yield from ((f"cut at {share}", cut(share)) for share in CUTS)
    yield from ((f"bit {number}", flipped(draw)) for number in range(BITS))
    yield "a folder", folder


@contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    content = path.read_bytes()
    damage(path)
    try:
        yield
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(content)


def check(command: Callable[[], None], what: str) -> bool:
    """Whether a command refuses the run, in one sentence that names it; it raises nothing else.

    The function is called, not the program: parsing its arguments would take longer than it does.
    """
    try:
        command()
    except FedlensError as error:
        assert NAME in str(error), what
        assert "\n" not in str(error), what
        return True
    return False


RECORDS = [
    "config.yaml", "manifest.json", "result.json", "choice.json", "partition.json", "masks.json",
    "metrics.jsonl", "test_curve.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("file", RECORDS)
def test_commands_that_read_records(
    file: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run.path.parent
    commands: dict[str, Callable[[], None]] = {
        "show": lambda: cli.runs.show(NAME, root),
        "show as JSON": lambda: cli.runs.show(NAME, root, as_json=True),
        "ls": lambda: cli.runs.ls(root),
        "ls as JSON": lambda: cli.runs.ls(root, as_json=True),
        "records": lambda: cli.report.records(root, tmp_path / "records.tar.xz"),
        "report": lambda: cli.report.report([root], tmp_path / "report"),
    }
    reports_refused = 0
    for how, damage in ways():
        if (file, how) == ("result.json", "missing"):  # a run that is not finished
            continue
        with damaged(run.path / file, damage):
            refused, printed = {}, {}
            for command, call in commands.items():
                refused[command] = check(call, f"{command}, {file}: {how}")
                printed[command] = capsys.readouterr().out
        for command in ("ls", "ls as JSON"):
            assert NAME in printed[command], how
            assert not refused[command], how
            if file == "result.json":
                assert ("unreadable" in printed[command]) == refused["show"], how
        reports_refused += refused["report"]
    if file in ("config.yaml", "manifest.json", "result.json", "metrics.jsonl"):
        assert reports_refused >= len(KINDS) - 1
    assert not list(root.glob(f"{TEMPORARY}*"))


@pytest.mark.parametrize("file", ["masks.safetensors", "config.yaml", "masks.json"])
def test_masks(file: str, run: RunFolder) -> None:
    for how, damage in ways():
        with damaged(run.path / file, damage):
            refused = check(lambda: cli.masks.show([NAME], run.path.parent), f"{file}: {how}")
        assert refused == (file == "masks.safetensors"), how


def test_an_analysis_on_record(run: RunFolder) -> None:
    """A missing record would be computed again, and a changed bit may be in its white space."""
    (path,) = run.path.glob("arithmetic/alpha*/record.json")
    for how, damage in ways():
        if how == "missing":
            continue
        with damaged(path, damage):
            refused = check(lambda: alpha(run), f"record.json: {how}")
            assert refused or how.startswith(("bit", "cut at 0.99")), how


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("result.json", "a number"),
        ("manifest.json", "not UTF-8"),
        ("config.yaml", "a list"),
        ("checkpoints/*1/state.json", "empty"),
        ("checkpoints/*1/tensors.safetensors", "not UTF-8"),
        ("checkpoints/*1/hashes.json", "missing"),
        ("updates/*/start.safetensors", "a word"),
    ],
)
def test_an_analysis_that_is_computed(file: str, how: str, run: RunFolder) -> None:
    (path,) = run.path.glob(file)
    with damaged(path, written(KINDS[how])):
        methods = {"method": ["average"], "scales": "1", "root": run.path.parent}
        assert check(lambda: cli.arithmetic.merge(NAME, **methods), file)


def test_what_a_killed_analysis_left_is_removed(run: RunFolder) -> None:
    (record,) = run.path.glob("arithmetic/alpha*/record.json")
    left = record.with_name(f"{TEMPORARY}figure.png-0123abcd")
    left.write_bytes(b"half a figure")
    alpha(run)
    assert not left.exists()
