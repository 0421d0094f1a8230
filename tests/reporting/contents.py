"""Contents of reports built by hand: one with something in every part, one with next to nothing."""

from typing import Any

from fedlens.reporting.study.content import (
    About,
    AlphaCurve,
    Author,
    Cell,
    Chapter,
    Check,
    Content,
    Contrast,
    Curve,
    CurveSet,
    Finding,
    Grid,
    MaskMap,
    Observation,
    PartitionPicture,
    Provenance,
)
from fedlens.reporting.study.questions import questions

ABOUT = About(authors=[Author("Ada Example", "s1", "A University"), Author("Ben Example")])
HERE, THERE = "synthetic benchmark, ViT pico at 32 px", "CIFAR-100, ViT-Ti/16 at 160 px"
RULES = ("dense", "least sensitive", "random")
PARTS = ("IID", "Nc=1")


def cell(mean: float, seeds: list[int], half: float = 0.42, **told: Any) -> Cell:
    several = len(seeds) > 1
    defaults: dict[str, Any] = {
        "deviation": half / 2 if several else None,
        "half": half if several else None,
        "validation": mean - 1,
        "seeds": seeds,
        "method": "full fine-tuning, ridge head frozen, FedAvg, J=8",
        "lr": 0.01,
        "candidates": 3,
        "megabytes": 307.2,
        "runs": [f"sparse_iid_s{seed}_abc{seed}" for seed in seeds],
    }
    return Cell(mean=mean, **{**defaults, **told})


def mask(label: str, run: str) -> MaskMap:
    return MaskMap(
        name="mask", rule=label.partition(",")[0], label=label, trained=10, total=100,
        layers=["embedding", "block 0"],
        kinds=["patch", "q"], density=[[0.3, None], [None, 0.05]], run=run,
    )  # fmt: skip


def run(name: str, setting: str = HERE, seed: int = 0) -> Provenance:
    return Provenance(
        name=name, setting=setting, seed=seed, command=f"fedlens run {name} seed={seed}",
        commit="c0ffee" * 6, versions={"fedlens": "0.1.0", "torch": "2.15.0"}, device="cpu",
        threads=2, inputs={"data": "d1" * 32, "weights": None}, parameters="e2" * 32,
        chosen="round 8, chosen on validation", validation=50.0, test=49.5, used=True,
    )  # fmt: skip


def chapter(setting: str, **told: Any) -> Chapter:
    empty: dict[str, Any] = {
        "headline": None, "grids": [], "curves": [], "masks": [], "alphas": [], "findings": [],
        "partitions": [], "facts": {"clients": [10], "density": []},
    }  # fmt: skip
    return Chapter(setting=setting, **{**empty, **told})


def minimal() -> Content:
    """One run that trained nothing worth a table."""
    return Content(ABOUT, questions(), [chapter(THERE)], [], [run("alone", THERE)], {})


def rich() -> Content:
    """Two settings; the first has all there is."""
    here = chapter(
        HERE, headline=_headline(), grids=_grids(), curves=_curves(),
        masks=[mask(f"{rule}, density 0.1", f"{rule}_s0_1") for rule in RULES],
        alphas=_alphas(), findings=_findings(), partitions=_partitions(),
    )  # fmt: skip
    central = _grid(
        "central-setting2", "central", "Central baselines", ["full fine-tuning"], ["accuracy"]
    )
    there = chapter(THERE, grids=[central])
    audit = [
        Check("Nothing was chosen on test data", "3 runs", [], []),
        Check("Differences are paired by seed", "2 differences", [], ["1 accuracy has one seed"]),
    ]
    runs = [run("sparse_iid_s0_abc0"), run("sparse_iid_s1_abc1", seed=1), run("far_s0_1", THERE)]
    return Content(ABOUT, questions(), [here, there], audit, runs, {"unfinished_s0_1": "stopped"})


def _grid(
    name: str, question: str, title: str, rows: list[str], columns: list[str], **told: Any
) -> Grid:
    cells = told.pop("cells", [[cell(70.0, [0]) for _ in columns] for _ in rows])
    return Grid(
        name, question, title, "10 clients, 1 per round.", "method", rows, columns, cells, **told
    )


def _headline() -> Grid:
    three = [0, 1, 2]
    cells = [
        [cell(78.74, [0], megabytes=None), None],
        [cell(54.69, three), cell(54.03, three, megabytes=30.2)],
        [cell(49.33, three), cell(50.0, three, megabytes=30.2)],
    ]
    rows = ["central", "FedAvg, IID", "FedAvg, Nc=1"]
    title = "Central and federated training, dense and sparse"
    return _grid("six_models", "six_models", title, rows, ["dense", "sparse"], cells=cells)


def _grids() -> list[Grid]:
    rules = [
        Contrast("least sensitive", "dense", "IID", -1.18, 0.62, 3, 0.02, 0.056),
        Contrast("random", "dense", "IID", -0.66, 0.04, 3, 0.0001, 0.0002),
    ]
    single = [Contrast("Nc=1", "IID", "J=8", -39.56, None, 1, None, None)]
    cells = [[cell(50.0 + r, [0, 1, 2]) for _ in PARTS] for r, _ in enumerate(RULES)]
    parts, rows = list(PARTS), list(RULES)
    return [
        _grid("schedules", "schedules", "Schedules", ["constant", "cosine"], parts),
        _grid("heads", "heads", "Heads", ["ridge", "linear"], [*parts, "Nc=5", "central"]),
        _grid("under_heads", "under_heads", "Under a head", ["linear", "ridge frozen"], parts),
        _grid("local_steps", "local_steps", "Local steps", parts, ["J=4", "J=8", "J=16"]),
        _grid("heterogeneity", "heterogeneity", "Heterogeneity", parts, ["J=8"], contrasts=single),
        _grid("mask_rules", "mask_rules", "Mask rules", rows, parts, cells=cells, contrasts=rules),
        _grid("sparsity", "sparsity", "Density", ["density 0.1", "density 0.01"], parts),
        _grid("calibration_rounds", "calibration_rounds", "Rounds", ["1 round", "4 rounds"], parts),
        _grid("algorithms", "algorithms", "Algorithms", ["FedAvg", "SCAFFOLD"], parts),
    ]  # fmt: skip


def _curves() -> list[CurveSet]:
    names = [f"{rule}, {part}" for rule in RULES for part in PARTS]
    curves = [
        Curve(
            name, ["a", "b"], [0, 4, 8], [0, 32, 64], [0.0, 1.5, 3.0],
            [40.0 + place, 45.0 + place, 50.0 + place], [0.5, 0.5, 0.5],
        )
        for place, name in enumerate(names)
    ]  # fmt: skip
    seen = [
        Observation(name, ["a"], [1, 2], [1.0, 0.5], [0.1, None], [0.6, 0.7]) for name in names[:2]
    ]
    central = Curve("central, dense", ["a"], [1, 2], [50, 100], [], [60.0, 78.0], [None, None])
    return [
        CurveSet("mask_rules", "mask_rules", "Mask rules", "round", curves, seen),
        CurveSet(
            "six_models",
            "six_models",
            "Central and federated training, dense and sparse",
            "epoch",
            [central],
            [],
        ),
    ]


def _alphas() -> list[AlphaCurve]:
    return [
        AlphaCurve(
            "alpha-1", "full fine-tuning, seed 0", "pretrained", [0.0, 0.5, 1.0],
            [48.0, 50.0, 49.0],
            [1.5, 1.4, 1.45], 0.5, 49.9, 49.1, 0.0, f"run_s0_{end}",
        )
        for end in ("aa", "bb")
    ]  # fmt: skip


def _findings() -> list[Finding]:
    def score(accuracy: float) -> dict[str, Any]:
        return {"loss": 1.5, "top1": accuracy, "per_class": [0.5] * 100}

    def parts(accuracy: float) -> dict[str, Any]:
        return {"target": accuracy, "control": accuracy - 0.1, "validation": score(accuracy)}

    tested = {**score(0.5), "target": 0.4, "control": None}
    ends = {"chosen": 1, "test": tested, "as_trained": {"test": tested}}
    records: dict[str, dict[str, Any]] = {
        "merge": {**ends, "candidates": [
            {"method": m, "scale": s, "validation": score(0.4 + s / 10)}
            for m in ("average", "task_arithmetic") for s in (0.1, 1.0)
        ]},
        "clients": {**ends, "candidates": [parts(0.5), parts(0.4)]},
        "forget": {**ends, "candidates": [{"scale": s, **parts(0.6 - s / 10)} for s in (0.0, 1.0)]},
        "compose": {**ends, "candidates": [
            {"alpha": a, "validation": score(0.5)} for a in (0.0, 1.0)
        ]},
        "interference": {
            "clients": [3, 8], "pair": [3, 8], "cosine": [[1.0, -0.2], [-0.2, 1.0]],
            "sign_conflict": [[0.0, 0.6], [0.6, 0.0]], "alphas": [0.0, 1.0],
            "disentanglement_error": [[0.0, 0.1], [None, 0.2]], "sign_conflict_of_all": 0.6,
            "accuracy_merged": [0.35, 0.85], "accuracy_alone": [0.35, 0.8], "round": 4,
        },
    }  # fmt: skip
    return [
        Finding(
            f"{kind}-1",
            kind,
            "full fine-tuning, seed 0",
            [("model", "θ + α Σ c τ")],
            "run_s0_a",
            record,
        )
        for kind, record in records.items()
    ]


def _partitions() -> list[PartitionPicture]:
    told = {"min": 1, "mean": 1.5, "max": 2}
    summary = {"sizes": told, "emd": told}
    held = [[5, 0, 1], [0, 6, 0]]
    return [
        PartitionPicture("partition-1", "IID", 2, 12, summary, held, "run_s0_a"),
        PartitionPicture("partition-2", "Nc=1", 5000, 12, summary, [], "run_s0_a"),
    ]
