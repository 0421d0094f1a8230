import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlens.errors import FedlensError
from fedlens.reporting.figures.partition import partition_figure


def record(clients: int, *, lists: bool = True, histogram: bool = False) -> dict[str, Any]:
    """Client k holds k + 1 samples of class 0 and one of class 1."""
    measures: dict[str, list[float]] = {
        "sizes": [k + 2 for k in range(clients)],
        "classes_per_client": [2] * clients,
        "label_entropy": [0.5] * clients,
        "emd": [k / clients for k in range(clients)],
    }
    found: dict[str, Any] = {"clients": clients, "samples": int(sum(measures["sizes"]))}
    if lists:
        found |= measures
    found["summary"] = {
        name: {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}
        for name, values in measures.items()
    }
    made: dict[str, Any] = {"name": "dirichlet", "statistics": found}
    if histogram:
        made["histogram"] = [[k + 1, 1, 0] for k in range(clients)]
    return made


def text(path: Path) -> str:
    """An SVG draws its words as glyphs and keeps each as a comment."""
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_format_follows_the_suffix(tmp_path: Path) -> None:
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml", "PNG": b"\x89PNG"}
    for suffix, start in starts.items():
        path = tmp_path / f"partition.{suffix}"
        partition_figure(record(3, histogram=True), path)
        assert path.read_bytes().startswith(start)
    width, height = struct.unpack(">II", (tmp_path / "partition.png").read_bytes()[16:24])
    assert (width, height) == (1680, 1008)
    assert len(list(tmp_path.iterdir())) == len(starts)


@pytest.mark.parametrize(
    ("clients", "lists", "histogram"),
    [(1, True, True), (200, True, True), (3, True, False), (300, True, True), (1001, False, False)],
)
def test_every_size_of_partition_has_a_labelled_picture(
    clients: int, lists: bool, histogram: bool, tmp_path: Path
) -> None:
    path = tmp_path / "partition.svg"
    partition_figure(record(clients, lists=lists, histogram=histogram), path)
    words = text(path)
    total = sum(range(2, clients + 2))
    assert f"Partition 'dirichlet': K = {clients:,} clients, N = {total:,} training" in words
    for label in ("samples per client", "classes per client", "label entropy", "EMD to the global"):
        assert f"<!-- {label}" in words
    assert ("<!-- client -->" in words) == (histogram and clients <= 200)
    assert ("<!-- clients -->" in words) == lists


@pytest.mark.slow
def test_a_partition_in_which_all_are_alike_is_drawn(tmp_path: Path) -> None:
    """No range has a width: one class, entropy and distance zero."""
    alike = record(2, histogram=True)
    alike["histogram"] = [[4], [4]]
    flat = {"sizes": [4, 4], "classes_per_client": [1, 1], "label_entropy": [0.0] * 2}
    alike["statistics"] |= {**flat, "emd": [0.0, 0.0]}
    partition_figure(alike, tmp_path / "alike.svg")
    assert "<!-- mean 0 -->" in text(tmp_path / "alike.svg")
    one = {"min": 9, "mean": 9.0, "max": 9}
    many = {"clients": 5000, "samples": 45000, "summary": dict.fromkeys(alike["statistics"], one)}
    partition_figure({"name": "iid", "statistics": many}, tmp_path / "many.svg")
    assert "<!-- all: 9 -->" in text(tmp_path / "many.svg")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"\.png, \.svg or \.pdf file, not 'partition\.jpeg'"):
        partition_figure(record(2), tmp_path / "partition.jpeg")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_drawing_loads_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys, fedlens.reporting.figures.partition;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib.pyplot')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
