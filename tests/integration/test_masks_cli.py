"""`fedlens masks show` on small files: its tables, its figure, and mistakes in one sentence."""

from functools import partial
from pathlib import Path

import pytest
import torch

from fedlens.config.compose import compose, to_yaml
from fedlens.sparse import mask_files
from tests.integration.conftest import Call

SIZES = {
    "backbone.patch_embed.proj.weight": (4, 3, 2, 2),
    "backbone.blocks.0.attn.qkv.weight": (12, 4),
    "backbone.blocks.0.mlp.fc1.weight": (8, 4),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def show(fedlens: Call) -> Call:
    return partial(fedlens, "masks", "show")


def masks(*rows: slice) -> dict[str, torch.Tensor]:
    """No patch weights; these rows of qkv and of the mlp."""
    made = {name: torch.zeros(size, dtype=torch.bool) for name, size in SIZES.items()}
    for name, chosen in zip(list(made)[1:], rows, strict=True):
        made[name][chosen] = True
    return made


FIRST = masks(slice(0, 5), slice(0, 2))  # 20 of q and k, 8 of mlp
SECOND = masks(slice(4, 8), slice(0, 2))  # 16 of k, 8 of mlp


def provenance(rule: str, seed: int = 0) -> dict[str, object]:
    return {"rule": rule, "density": 0.2, "scope": "global", "seed": seed, "torch": "2"}


def run(name: str, *overrides: str) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(compose("quickstart", list(overrides))))
    return folder


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_one_run_by_part_of_its_name(show) -> None:
    mask_files.save(run("quick_s0") / "masks.safetensors", FIRST, provenance("least_sensitive"))
    code, out, _ = show("quick")
    assert code == 0
    assert lines(out)[:10] == [
        "least sensitive 20%",
        "file runs/quick_s0/masks.safetensors",
        "mask rule least sensitive, density 0.2, scope global",
        "seed 0",
        "trained 28 of 128 weights",
        "",
        "density in % patch q k v mlp all",
        "embedding 0 – – – – 0",
        "block 0 – 100.00 25.00 0 25.00 35.00",
        "all 0 100.00 25.00 0 25.00 21.88",
    ]
    assert "Jaccard" not in out


def test_runs_and_files_are_compared_and_drawn(show) -> None:
    mask_files.save(run("quick") / "masks.safetensors", FIRST, provenance("least_sensitive"))
    mask_files.save(Path("other.safetensors"), SECOND, provenance("random"))
    code, out, _ = show("quick", "other.safetensors", "runs/quick", "--figure", "pictures/m.svg")
    assert code == 0
    # 12 weights in both of 40 in either; by chance 28/128 · 24/128 over their sum less it
    assert lines(out)[-4:] == [
        "Jaccard overlap 1 2",
        "1 least sensitive 20% 1 0.300 (0.112 by chance)",
        "2 random 20% 0.300 (0.112 by chance) 1",
        "figure: pictures/m.svg",
    ]
    assert "<!-- 2  random 20% -->" in Path("pictures/m.svg").read_text(encoding="utf-8")


def test_masks_of_one_rule_go_by_their_runs(show) -> None:
    for seed, made in enumerate((FIRST, SECOND)):
        mask_files.save(
            run(f"quick_s{seed}") / "masks.safetensors", made, provenance("random", seed)
        )
    code, out, _ = show("quick_s0", "quick_s1")
    assert code == 0
    assert "1 quick_s0 1 0.300" in "\n".join(lines(out))
    for folder in ("a", "b"):
        mask_files.save(Path(folder) / "same.safetensors", FIRST, {})
    code, out, _ = show("a/same.safetensors", "b/same.safetensors")
    assert "2 b/same.safetensors 1.000 (0.123 by chance) 1" in lines(out)


def test_the_folder_of_runs_can_be_named(show) -> None:
    mask_files.save(run("quick") / "masks.safetensors", FIRST, provenance("random"))
    Path("runs").rename("elsewhere")
    assert show("quick", "--runs", "elsewhere")[0] == 0


def test_mistakes_are_one_sentence(show) -> None:
    run("dense")
    run("begun", "sparse.density=0.1", "head=ridge")
    assert_refused(show("dense"), "dense trains all weights and has no masks")
    assert_refused(show("begun"), "begun has no masks yet", "fedlens resume runs/begun")
    assert_refused(show("nothing"), "No run 'nothing' in runs")
    assert_refused(show("absent.safetensors"), "no masks at absent.safetensors")
    Path("broken.safetensors").write_bytes(b"not masks")
    assert_refused(show("broken.safetensors"), "broken.safetensors is damaged")
    mask_files.save(Path("a.safetensors"), FIRST, provenance("random"))
    smaller = {name: mask[:3] for name, mask in FIRST.items()}
    mask_files.save(Path("b.safetensors"), smaller, provenance("least_sensitive"))
    result = show("a.safetensors", "b.safetensors", "--figure", "m.png")
    assert_refused(result, "do not cover the same weights", "compare masks of one model")
    assert not Path("m.png").exists()


def test_a_wrong_figure_is_refused_before_anything_is_read(show) -> None:
    assert_refused(show("nothing at all", "--figure", "masks.jpeg"), "not 'masks.jpeg'")


def test_help_has_an_example(show) -> None:
    code, out, _ = show("--help")
    assert code == 0
    assert "fedlens masks show RUN1 RUN2 --figure masks.png" in " ".join(out.split())
