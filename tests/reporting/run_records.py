"""Tiny run folders on disk, in the formats that runs write: no model, no training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fedlens.config.labels import labels
from fedlens.config.schema import ROW_KEYS, Config, rounds, unit
from fedlens.registry import REGISTRIES
from fedlens.reporting.assemble import _typed
from fedlens.reporting.study.runs import Method, Study, read

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
MASKABLE = 1000
MEGABYTE = 1_000_000
SMALL = {  # two rounds of four local steps with two of ten clients
    "experiment": "quickstart_fedavg",
    "data.name": "synthetic",
    "backbone.name": "vit_pico",
    "backbone.resolution": 32,
    "federated.clients": 10,
    "federated.participation": 0.2,
    "federated.local_steps": 4,
    "federated.local_step_budget": 8,
    "train.epochs": 2,
}
CENTRAL = {"federated.clients": None, "experiment": "quickstart"}
RIDGE = {"head.name": "ridge", "head.freeze": True}
HEAD_ONLY = {**RIDGE, "train.trainable.name": "head", "experiment": "federated_ridge"}
NONIID = {"partition.name": "classes", "partition.classes_per_client": 1}
CYCLIC = {"algorithm.sampling.name": "cyclic"}
FEDPROX = {"algorithm.proximal": 0.1}


def masked(rule: str = "least_sensitive", density: float = 0.1) -> dict[str, Any]:
    return {"sparse.rule.name": rule, "sparse.density": density}


def config_of(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The small config with dotted keys changed; rows have all their parameters."""
    values = {**SMALL, **(changes or {})}
    config = asdict(Config())
    for key, kind in ROW_KEYS.items():
        chosen = {"name": value_at(config, key)}
        chosen |= {
            k.removeprefix(f"{key}."): v for k, v in values.items() if k.startswith(f"{key}.")
        }
        put(config, key, _complete(kind, key, chosen))
    config["head"]["freeze"] = bool(config["head"]["freeze"])
    for key, value in values.items():
        if not any(key.startswith(f"{row}.") for row in ROW_KEYS):
            put(config, key, value)
    return config


def _complete(kind: str, key: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """A row from outside the package, whose plugin is not loaded, stays as it is."""
    registry = REGISTRIES[kind]
    return dict(registry.settings(chosen, key)) if chosen["name"] in registry else chosen


def labels_of(config: Mapping[str, Any]) -> dict[str, str]:
    """What a run records of its rows; a row that is not loaded has the label of the default."""
    known = json.loads(json.dumps(config))
    for key, kind in ROW_KEYS.items():
        if value_at(known, key)["name"] not in REGISTRIES[kind]:
            put(known, key, _complete(kind, key, {"name": value_at(asdict(Config()), key)}))
    return labels(_plan(known))


def _plan(config: Mapping[str, Any]) -> Config:
    """The config as a schema, without keys that this version does not know."""
    return _typed(Config, _known(config, asdict(Config())))


def _known(tree: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _known(value, schema[key]) if isinstance(schema[key], dict) else value
        for key, value in tree.items()
        if key in schema
    }


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for step in path:
        tree = tree[step]
    tree[last] = value


def write_run(
    root: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    test: float = 0.5,
    validation: float | Sequence[float] = 0.5,
    trains: bool = True,
    name: str = "",
    recorded: Mapping[str, str] | None = None,
) -> Path:
    """`validation` by epoch or round, or that of the last, which is then the best.

    `recorded` labels replace those of the registry, as a run with a plugin would record them.
    """
    config = config_of({**(changes or {}), "seed": seed})
    plan = _plan(config)
    counted = unit(plan)
    units = 0 if not trains else rounds(plan) if counted == "round" else config["train"]["epochs"]
    text = json.dumps(config, sort_keys=True)
    name = name or f"run_s{seed}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    config["run"]["name"] = name
    scores = _scores(validation, units)
    best = max(scores, key=lambda number: (scores[number], -number))
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=DUMPER), encoding="utf-8")
    what = {**_what(config, counted), "labels": labels_of(config) | dict(recorded or {})}
    mask = config["sparse"]["density"]
    dump(folder / "manifest.json", {
        "name": name, **what,
        "inputs": {"data": "d" * 8, "weights": "w" * 8},
        "sessions": [{
            "started": "2026-01-01T00:00:00+00:00", "command": "fedlens run it", "git": "c" * 8,
            "device": "cpu", "threads": 1,
            "versions": {"fedlens": "0.1.0", "torch": "2", "timm": "1"},
        }],
        **({"masks": f"{config['sparse']['rule']['name']}-{mask}-{seed}"} if mask else {}),
    })  # fmt: skip
    metrics = [_metrics(config, counted, number, score) for number, score in scores.items()]
    write_journal(folder, metrics)
    choice = {"parameters": f"digest of {name}", "chosen_on": "validation", "unit": best}
    dump(folder / "choice.json", choice)
    dump(folder / "result.json", {
        **what, "choice": choice, "units": units,
        "validation": next(r["validation"] for r in metrics if r[counted] == best),
        "test": {"loss": 1.0, "top1": test, "per_class": [test] * 10, "count": 10_000},
        "facts": _facts(config, mask), "seconds": 1.0, "finished": "2026-01-01T00:01:00+00:00",
    })  # fmt: skip
    if counted == "round":
        alike = {"min": 1.0, "mean": 1.0, "max": 1.0}
        summary = dict.fromkeys(("sizes", "classes_per_client", "label_entropy"), alike)
        summary["emd"] = dict.fromkeys(("min", "mean", "max"), _skew(config["partition"]))
        statistics = {"clients": 10, "samples": 100, "summary": summary}
        dump(folder / "partition.json", {**config["partition"], "statistics": statistics})
    if mask:
        dump(folder / "masks.json", _mask(mask))
    return folder


def write_study(root: Path) -> Path:
    """Two seeds on even data and two with one class per client."""
    for seed in (0, 1):
        write_run(root, seed=seed, test=0.6 + seed / 100)
        write_run(root, NONIID, seed=seed, test=0.3 + seed / 50)
    return root


def write_alpha(run: Path, chosen: int = 1) -> Path:
    """α = 0, 1, 2 came to 40, 60 and 50 % on validation."""
    result = load(run / "result.json")
    rows = [
        {"alpha": float(alpha), "validation": {"loss": 1.0, "top1": top1}}
        for alpha, top1 in enumerate((0.4, 0.6, 0.5))
    ]
    as_trained = {"unit": result["units"], "validation": rows[1]["validation"]}
    path = run / "arithmetic" / "alpha-pretrained" / "record.json"
    path.parent.mkdir(parents=True)
    dump(path, {
        "kind": "alpha", "base": "pretrained", "norm": 1.5, "run": run.name, "candidates": rows,
        "chosen": chosen, "choice": {**result["choice"], "chosen_on": "validation"},
        "test": {"loss": 1.0, "top1": 0.61}, "barrier": 0.0,
        "as_trained": {**as_trained, "test": result["test"]},
    })  # fmt: skip
    return path


def study_of(root: Path) -> Study:
    return read([root])


def methods_of(root: Path) -> list[Method]:
    return study_of(root).methods


def load(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def dump(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit(path: Path, key: str, value: Any) -> None:
    """Changes one dotted key of a JSON file."""
    record = load(path)
    put(record, key, value)
    dump(path, record)


def journal(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_journal(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")


def _skew(partition: Mapping[str, Any]) -> float:
    """About the label skew that is measured for such a partition."""
    if partition["name"] == "classes":
        return 1 - float(partition["classes_per_client"]) / 100
    if partition["name"] == "dirichlet":
        return 1 / (1 + float(partition["alpha"]))
    return 0.01 * float(partition.get("sigma", 0.0))


def _scores(validation: float | Sequence[float], units: int) -> dict[int, float]:
    if not units:
        assert isinstance(validation, float)
        return {0: validation}
    if isinstance(validation, float):
        return {n: validation - 0.01 * (units - n) for n in range(1, units + 1)}
    assert len(validation) == units
    return dict(enumerate(validation, start=1))


def _what(config: Mapping[str, Any], counted: str) -> dict[str, Any]:
    record = {
        "data": config["data"]["name"],
        "backbone": config["backbone"]["name"],
        "resolution": config["backbone"]["resolution"],
        "seed": config["seed"],
        "unit": counted,
    }
    if config["sparse"]["density"]:
        record |= {
            "density": config["sparse"]["density"],
            "mask_rule": config["sparse"]["rule"]["name"],
        }
    if counted == "round":
        record |= {
            "clients": config["federated"]["clients"],
            "local_steps": config["federated"]["local_steps"],
            "algorithm": labels_of(config)["algorithm"],
            "partition": config["partition"],
        }
    return record


def _metrics(config: Mapping[str, Any], counted: str, number: int, score: float) -> dict[str, Any]:
    record: dict[str, Any] = {counted: number, "validation": {"loss": 1.0, "top1": score}}
    if number and counted == "epoch":
        record |= {"steps": 7, "train": {"loss": 1.0, "accuracy": 0.5}}
    elif number:
        cohort = round(config["federated"]["clients"] * config["federated"]["participation"])
        record |= {
            "participants": list(range(cohort)), "train": {"loss": 1.0, "accuracy": 0.5},
            "bytes_down": 2 * MEGABYTE, "bytes_up": MEGABYTE,
            "drift": float(number), "cosine": 0.5, "sign_agreement": None,
        }  # fmt: skip
    return record


def _facts(config: Mapping[str, Any], mask: float | None) -> dict[str, Any]:
    ridge = config["head"]["name"] == "ridge" and config["federated"]["clients"]
    return {
        **({"statistics_bytes_up": 5 * MEGABYTE} if ridge else {}),
        **({"weights_trained": round(mask * MASKABLE), "weights_maskable": MASKABLE}
           if mask else {}),
    }  # fmt: skip


def _mask(density: float) -> dict[str, Any]:
    entry = {"trained": round(density * MASKABLE), "total": MASKABLE, "density": density}
    return {
        "all": entry,
        "layers": {"block 0": entry, "block 1": entry},
        "kinds": {"q": entry, "mlp": entry},
        "table": {"block 0": {"q": entry}, "block 1": {"mlp": entry}},
    }


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for step in key.split("."):
        value = value[step]
    return value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All dotted keys of a config that are not groups."""
    return [
        key
        for name, value in tree.items()
        for key in (
            leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
        )
    ]
