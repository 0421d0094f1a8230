"""Flower is an optional extra: without it, its commands say so and all others work.

No `importorskip` here: these tests pass with and without it.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.conftest import Order

REFUSED = [
    ("run", "quickstart_fedavg", "engine=flower"),
    ("run", "quickstart_fedavg", "engine=flower_simulation"),
    ("flower", "up"),
]
ALLOWED = ("config", "quickstart_fedavg", "engine=serial")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    files: list[Path]  # that it left


def outcome(words: tuple[str, ...], zygote: Order, folder: Path) -> Outcome:
    """The command in a process that has imported nothing of Flower but the rest, and cannot."""
    empty = folder / "empty"
    empty.mkdir()
    printed = {name: folder / name for name in ("out", "err")}
    code = zygote(*words, at=str(empty), **{name: str(path) for name, path in printed.items()})
    texts = [path.read_text("utf-8") for path in printed.values()]
    return Outcome(code["status"], *texts, list(empty.iterdir()))


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_without_flower_the_error_says_how_to_install_it(
    words: tuple[str, ...], zygote: Order, tmp_path: Path
) -> None:
    found = outcome(words, zygote, tmp_path)
    assert found.code == 2, found.err
    assert "fedlens[flower]" in found.err
    assert "Traceback" not in found.err
    assert found.files == []  # neither a run nor a federation was started


def test_commands_that_need_no_flower_work_without_it(zygote: Order, tmp_path: Path) -> None:
    found = outcome(ALLOWED, zygote, tmp_path)
    assert found.code == 0, found.err
    assert "name: serial" in found.out
