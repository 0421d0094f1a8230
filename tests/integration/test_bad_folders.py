"""A finished run, damaged in a few hundred ways: every command that reads it names the run."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlens.config.compose import compose
from fedlens.experiments.run import start
from fedlens.files import TEMPORARY
from fedlens.reporting.figures import analyses
from fedlens.store.run_folder import RunFolder
from tests.integration.conftest import FEDERATED, TINY, Call

NAME = "the-damaged-one"
OPTIONS = [
    *TINY, *FEDERATED, "data.train_per_class=2", "data.test_per_class=1", "federated.rounds=1",
    "federated.keep_updates=1", "head=ridge", "sparse.density=0.1", "sparse.rule=random",
    f"run.name={NAME}",
]  # fmt: skip
ALPHA = ["arithmetic", "alpha", NAME, "--alphas", "0,1"]
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
CUTS = (0.3, 0.7, 0.99)
BITS = 6  # of each file, drawn at random


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    return start(compose("quickstart", [*OPTIONS, f"run.root={root}"]))


@pytest.fixture
def run(finished: RunFolder, fedlens: Call, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The run with an analysis on record; drawing, which takes longest, is left out."""
    monkeypatch.setattr(analyses, "draw", lambda record, path: None)
    monkeypatch.setattr("fedlens.reporting.report.report.write", lambda *args: None)
    monkeypatch.setattr("fedlens.reporting.report.paper.write", lambda *args: None)
    if not (finished.path / "arithmetic").exists():
        assert fedlens(*ALPHA, "--runs", str(finished.path.parent))[0] == 0
    return finished


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


def check(answer: tuple[int, str, str], what: str) -> int:
    """No traceback (it would be raised here), and an error is a sentence that names the run."""
    code, _, err = answer
    assert code in (0, 2), what
    if code:
        assert NAME in err, f"{what}: {err}"
        assert len(err.strip().splitlines()) <= 2, f"{what}: {err}"
        assert "Traceback" not in err, what
    return code


RECORDS = [
    "config.yaml", "manifest.json", "result.json", "choice.json", "partition.json", "masks.json",
    "metrics.jsonl", "test_curve.jsonl", "timings.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("file", RECORDS)
def test_commands_that_read_records(
    file: str, run: RunFolder, fedlens: Call, tmp_path: Path
) -> None:
    root, archive = run.path.parent, tmp_path / "records.tar.xz"
    commands = {
        "show": ["show", NAME, "--runs", str(root)],
        "show as JSON": ["show", NAME, "--json", "--runs", str(root)],
        "ls": ["ls", "--runs", str(root)],
        "ls as JSON": ["ls", "--json", "--runs", str(root)],
        "records": ["records", str(root), "--out", str(archive)],
        "report": ["report", str(root), "--out", str(tmp_path / "report")],
    }
    codes: dict[tuple[str, str], int] = {}
    for how, damage in ways():
        with damaged(run.path / file, damage):
            for command, words in commands.items():
                answer = fedlens(*words)
                codes[how, command] = check(answer, f"{command}, {file}: {how}")
                if command.startswith("ls"):
                    assert answer[0] == 0
                    assert NAME in answer[1]
                    if file == "result.json" and how not in ("missing",):
                        harmless = how.startswith("bit") and codes[how, "show"] == 0
                        assert harmless or "unreadable" in answer[1], how
        archive.unlink(missing_ok=True)
    if file in ("result.json", "manifest.json"):  # both are needed by all commands
        refused = [how for (how, command), code in codes.items() if command == "report" and code]
        assert len(refused) >= len(KINDS) - 1
    assert not list(root.glob(f"{TEMPORARY}*"))


@pytest.mark.parametrize("file", ["masks.safetensors", "config.yaml", "masks.json"])
def test_masks(file: str, run: RunFolder, fedlens: Call) -> None:
    for how, damage in ways():
        with damaged(run.path / file, damage):
            code = check(
                fedlens("masks", "show", NAME, "--runs", str(run.path.parent)), f"{file}: {how}"
            )
        assert code == (2 if file == "masks.safetensors" else 0), how


def test_an_analysis_on_record(run: RunFolder, fedlens: Call) -> None:
    """A missing record would be computed again, and a changed bit may be in its white space."""
    (path,) = run.path.glob("arithmetic/*/record.json")
    for how, damage in ways():
        if how == "missing":
            continue
        with damaged(path, damage):
            code = check(fedlens(*ALPHA, "--runs", str(run.path.parent)), f"record.json: {how}")
            assert code == 2 or how.startswith(("bit", "cut at 0.99")), how


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
def test_an_analysis_that_is_computed(file: str, how: str, run: RunFolder, fedlens: Call) -> None:
    (path,) = run.path.glob(file)
    with damaged(path, written(KINDS[how])):
        words = ["arithmetic", "merge", NAME, "--method", "average", "--scales", "1"]
        assert check(fedlens(*words, "--runs", str(run.path.parent)), file) == 2


def test_what_a_killed_analysis_left_is_removed(run: RunFolder, fedlens: Call) -> None:
    (record,) = run.path.glob("arithmetic/*/record.json")
    left = record.with_name(f"{TEMPORARY}figure.png-0123abcd")
    left.write_bytes(b"half a figure")
    assert fedlens(*ALPHA, "--runs", str(run.path.parent))[0] == 0
    assert not left.exists()
