import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedlens.errors import FedlensError
from fedlens.reporting.figures.analyses import draw
from fedlens.reporting.terminal.analyses import analysis_page

Row = dict[str, Any]


def measured(top1: float, loss: float = 1.0, **more: Any) -> Row:
    return {"loss": loss, "top1": top1, "top5": 1.0, **more}


def chosen(kind: str, rows: list[Row], place: int, **more: Any) -> Row:
    """A record in which candidate `place` was chosen; target and control go into the tests too."""
    parts = {key: rows[place][key] for key in ("target", "control") if key in rows[place]}
    return {
        "kind": kind,
        "run": "fedavg_s0",
        "candidates": rows,
        "chosen": place,
        "choice": {"unit": more.get("rounds", [4])[-1]},
        "test": measured(0.625, **parts),
        "as_trained": {"unit": 4, "validation": measured(0.5), "test": measured(0.55, **parts)},
        **more,
    }


def along(kind: str = "alpha", **more: Any) -> Row:
    """Losses 2, 2.5, 1, 3 at α = 0, 0.5, 1, 1.5: at 0.5 it is 1 above the chord."""
    points = [(0.0, 0.1, 2.0), (0.5, 0.3, 2.5), (1.0, 0.5, 1.0), (1.5, 0.6, 3.0)]
    rows = [{"alpha": a, "validation": measured(top1, loss)} for a, top1, loss in points]
    return chosen(kind, rows, 3, norm=3.25, **more)


def merged() -> Row:
    methods = ["average", "task_arithmetic", "ties", "dare", "breadcrumbs", "consensus"]
    rows = [
        {"method": name, "scale": scale, "validation": measured(0.1 * place + scale / 10)}
        for place, name in enumerate(methods)
        for scale in (0.5, 1.0, 2.0)
    ]
    return chosen("merge", rows, 8, round=4, clients=[0, 3, 7], density=0.2)


def edited(control: float | None = 0.6) -> Row:
    rows = [
        {"edit": word, "validation": measured(top1), "target": target, "control": control}
        for word, top1, target in (("none", 0.5, 0.4), ("asked for", 0.45, 0.125))
    ]
    return chosen("clients", rows, 1, rounds=[3, 4], coefficients={"3": 0.0, "5": -1.0})


def forgotten(client: int | None = None) -> Row:
    points = [(0.0, 0.8, 0.6), (1.0, 0.3, 0.59), (2.0, 0.05, 0.575), (3.0, 0.0, 0.3)]
    rows = [
        {"scale": s, "validation": measured(0.5), "target": target, "control": control}
        for s, target, control in points
    ]
    label = 7 if client is None else None
    about = {"class": label, "client": client, "clients": {"2": 1.0}, "keep": 0.95}
    return chosen("forget", rows, 2, rounds=[2, 3], **about)


def interfering(clients: int = 3) -> Row:
    def matrix(diagonal: float, other: float) -> list[list[float | None]]:
        count = range(clients)
        return [[diagonal if a == b else other for b in count] for a in count]

    alphas = [0.0, 0.5, 1.0, 1.5]
    return {
        "kind": "interference",
        "run": "fedavg_s0",
        "round": 4,
        "clients": [3 * k for k in range(clients)],
        "cosine": [*matrix(1.0, -0.25)[:-1], [None] * clients],  # the last one did not move
        "sign_conflict": matrix(0.0, 0.625),
        "sign_conflict_of_all": 0.875,
        "pair": [0, 3],
        "alphas": alphas,
        "disentanglement_error": [[a * b / 2.25 for b in alphas] for a in alphas],
        "accuracy_merged": [0.4, 0.45],
        "accuracy_alone": [0.8, 0.0],
        "accuracy_normalised": [0.5, None],
        "accuracy_normalised_mean": 0.5,
    }


RECORDS = {
    "alpha": along(base="pretrained", barrier=1.0),
    "alpha without ends": along(base="ridge"),
    "compose": along("compose", terms={"first": 1.0, "second": -0.5}),
    "merge": merged(),
    "clients": edited(),
    "clients who hold everything": edited(control=None),
    "forget a class": forgotten(),
    "forget a client": forgotten(client=2),
    "interference": interfering(),
    "interference of many": interfering(clients=30),
}


def shown(record: Row) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(analysis_page(record))
    return capture.get()


def lines(record: Row) -> list[str]:
    return [" ".join(line.split()) for line in shown(record).splitlines()]


@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_has_a_picture_and_a_page(kind: str, tmp_path: Path) -> None:
    draw(RECORDS[kind], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_bytes().startswith(b"<?xml")
    assert lines(RECORDS[kind])[0] == "run fedavg_s0"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alpha", "merge", "clients", "forget a class", "interference"])
def test_the_format_follows_the_suffix(kind: str, tmp_path: Path) -> None:
    for suffix, start in {"png": b"\x89PNG", "pdf": b"%PDF"}.items():
        path = tmp_path / f"figure.{suffix}"
        draw(RECORDS[kind], path)
        assert path.read_bytes().startswith(start)
    width, height = struct.unpack(">II", (tmp_path / "figure.png").read_bytes()[16:24])
    assert width >= 1100
    assert height >= 550
    with pytest.raises(FedlensError, match=r"not 'figure\.jpeg'"):
        draw(RECORDS[kind], tmp_path / "figure.jpeg")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("alpha", ["chosen: α = 1.5", "test: 62.5%", "chord", "barrier: 1", "pretrained", "run"]),
        ("compose", ["θ + α (+1·first -0.5·second)", "composed", "chosen: α = 1.5"]),
        ("merge", ["task arithmetic", "consensus", "chosen: ties, λ = 2", "test: 62.5%"]),
        ("clients", ["as trained", "edited", "target", "control", "12.5%"]),
        ("forget a class", ["target: class 7", "0.95 × control at λ = 0", "test, target: 5.0%"]),
        ("forget a client", ["target: the classes of client 2"]),
        (
            "interference",
            [
                "normalised accuracy at (1, 1): 50.0%",
                "disentanglement error",
                "α of client 3",
                "-0.25",
            ],
        ),
    ],
)
def test_a_picture_says_what_it_shows(kind: str, words: list[str], tmp_path: Path) -> None:
    draw(RECORDS[kind], tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for word in words:
        assert f"<!-- {word} -->" in drawn


def test_without_both_ends_there_is_no_chord(tmp_path: Path) -> None:
    draw(RECORDS["alpha without ends"], tmp_path / "figure.svg")
    assert "<!-- chord -->" not in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_lines_of_a_merge_differ_in_marker_and_in_colour() -> None:
    from fedlens.reporting.figures.analyses import LINES, merge_figure

    drawn = merge_figure(merged()).axes[0].get_lines()[:6]
    assert len({line.get_marker() for line in drawn}) == 6 == len(LINES)
    assert len({line.get_color() for line in drawn}) == 6


def test_the_barrier_stands_where_the_loss_is_highest_above_the_chord() -> None:
    from fedlens.reporting.figures.analyses import alpha_figure

    loss = alpha_figure(RECORDS["alpha"]).axes[1]
    (bar,) = (line for line in loss.get_lines() if line.get_label() == "barrier: 1")
    assert [list(values) for values in bar.get_data()] == [[0.5, 0.5], [1.5, 2.5]]


def test_the_frame_holds_all_scales_from_0_to_1() -> None:
    from fedlens.reporting.figures.analyses import interference_figure

    errors = interference_figure(interfering()).axes[2]
    (frame,) = errors.patches
    assert frame.get_bbox().bounds == (-0.5, -0.5, 3, 3)
    assert errors.get_ylim() == (-0.5, 3.5)  # α grows upwards


def test_the_chosen_candidate_is_marked_and_tested() -> None:
    said = lines(RECORDS["alpha"])
    assert "→ 1.5 3.0000 60.00%" in said
    assert sum(line.startswith("→") for line in said) == 1
    assert "test 62.50%" in said
    assert "as trained test 55.00%, validation 50.00%" in said
    assert "barrier 1.0000 above the chord, in validation loss" in said
    assert "note the best α is the largest tried: widen the grid" in said
    assert not any(line.startswith("mind") for line in lines({**RECORDS["alpha"], "chosen": 2}))


def test_target_and_control_stand_beside_the_accuracy() -> None:
    said = lines(RECORDS["clients"])
    assert "→ asked for 1.0000 45.00% 12.50% 60.00%" in said
    assert "edits client 3 × 0, client 5 × -1" in said
    assert "test 62.50% (target 12.50%, control 60.00%)" in said
    assert not any(line.startswith("mind") for line in said)
    said = "note the model as trained is from round 4, the edited one from round 3"
    assert said in lines(forgotten())
    assert "→ asked for 1.0000 45.00% 12.50% –" in lines(edited(control=None))


def test_what_was_left_out_and_what_may_mislead_is_said() -> None:
    record = along(splits_differ=True, left_out=[{"alpha": 9.0}])
    said = lines(record)
    assert "left out α = 9: its loss is not finite" in said
    assert (
        "note seeds differ: a run may have trained on images held out for validation here" in said
    )


def test_interference_in_numbers() -> None:
    said = lines(RECORDS["interference"])
    assert "cosine 0 3 6" in said
    assert "6 – – –" in said
    assert "merged / alone 50.00% –" in said
    assert "1.5 0.0% 33.3% 66.7% 100.0%" in said
    assert "sign conflict of all clients 87.50%" in said
    assert not any("cosine" in line for line in lines(interfering(clients=13)))


@pytest.mark.slow
def test_drawing_loads_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys, fedlens.reporting.figures.analyses, fedlens.cli.commands.arithmetic;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib.pyplot')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
