"""Run folders with all kinds of files, without any training."""

import json
from pathlib import Path


def make_run(root: Path, name: str, *, finished: bool = True, parameters: str = "1f0c") -> Path:
    folder = root / name
    for part in ("checkpoints/round-000001", "updates", "arithmetic/alpha_1"):
        (folder / part).mkdir(parents=True)
        (folder / part / "tensors.safetensors").write_bytes(b"weights")
    for record in ("config.yaml", "manifest.json", "metrics.jsonl", "partition.json"):
        (folder / record).write_text(json.dumps({"name": name}) + "\n")
    (folder / "arithmetic/alpha_1/record.json").write_text("{}")
    (folder / "checkpoints/round-000001/state.json").write_text("{}")
    (folder / "masks.safetensors").write_bytes(b"masks")
    (folder / "log.txt").write_text("/home/somebody")
    for empty in ("run.lock", "test_curve.jsonl"):
        (folder / empty).touch()
    if finished:
        write_result(folder, test=1, choice={"parameters": parameters, "unit": 3})
    return folder


def write_result(folder: Path, **result: object) -> None:
    (folder / "result.json").write_text(json.dumps(result))
