"""A disk cache of backbone features: runs with a frozen backbone compute them once.

An entry is a folder named by the digest of its key. It is built in chunks at fixed boundaries, so
a killed build resumes bit-identically, and processes that wait for an entry compute chunks too.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from fedlens import files
from fedlens.cache import recall, store
from fedlens.data.examples import Examples, in_order
from fedlens.errors import FedlensError

WHOLE = "features.safetensors"
CHUNK = 2048  # examples; half a minute or so of a small ViT on a laptop


def features(
    examples: Examples,
    extract: Callable[[torch.Tensor], torch.Tensor],
    *,
    key: Mapping[str, object],
    batch_size: int = 256,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] = lambda: None,
    root: Path | None = None,
) -> torch.Tensor:
    """`extract` of every example in order, float32 [N, D] on the CPU; cached under `key`.

    `key` has everything the features depend on (data, split, backbone, hash of its weights,
    resolution, normalisation, precision), as JSON. A model in `extract` must be in eval mode.
    `progress(done, total)` counts examples; `check` is called while another process builds them.
    """
    count = len(examples)
    if not count:
        raise ValueError("there are no examples to compute features of")
    identity, folder = _entry(count, key, batch_size, root)
    whole, chunks = folder / WHOLE, folder / "chunks"

    spans = in_order(count, CHUNK)

    def path_of(number: int) -> Path:
        return chunks / f"{number:05d}.safetensors"

    def compute(span: torch.Tensor, report: Callable[[int, int], None] | None) -> torch.Tensor:
        parts = []
        for index in torch.split(span, batch_size):
            parts.append(_checked(extract(examples.batch(index)), index))
            if report:
                report(int(index[-1]) + 1, count)
        return torch.cat(parts)

    def assist() -> bool:
        """Computes a missing chunk, from the end: the builder starts from the beginning."""
        missing = [number for number in range(len(spans)) if not path_of(number).exists()]
        if len(missing) < 2:  # the builder is computing the last one
            return False
        number = missing[-1 - os.getpid() % (len(missing) - 1)]
        with suppress(FedlensError):  # the builder meets the same error and reports it
            part = compute(spans[number], lambda done, total: check())
            store(path_of(number), {"features": part})
        return True

    def build() -> torch.Tensor:
        files.clear_partials(folder)
        files.clear_partials(chunks)
        files.write_json(folder / "key.json", identity)
        parts = []
        for number, span in enumerate(spans):
            part = _recall(path_of(number), len(span))
            if part is None:
                part = compute(span, progress)
                store(path_of(number), {"features": part})
            parts.append(part)
        result = torch.cat(parts)
        store(whole, {"features": result})
        return result

    with torch.no_grad():  # not inference_mode: heads are trained on the result
        result = files.make_once(
            folder, find=lambda: _recall(whole, count), make=build, check=check, assist=assist
        )
    shutil.rmtree(chunks, ignore_errors=True)
    return result


def stored(
    count: int, key: Mapping[str, object], *, batch_size: int = 256, root: Path | None = None
) -> torch.Tensor | None:
    """The features of `count` examples that `features` has cached under `key`, if it has."""
    _, folder = _entry(count, key, batch_size, root)
    return _recall(folder / WHOLE, count)


def _entry(
    count: int, key: Mapping[str, object], batch_size: int, root: Path | None
) -> tuple[dict[str, object], Path]:
    """What an entry is identified by, and its folder."""
    identity = {**key, "examples": count, "chunk": CHUNK, "batch_size": batch_size}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return identity, (root or files.cache_dir()) / "features" / name


def _checked(batch: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    batch = batch.float().cpu()
    if batch.ndim != 2 or len(batch) != len(index):
        raise ValueError(f"features of shape {tuple(batch.shape)} for {len(index)} examples")
    finite = batch.isfinite().all(dim=1)
    if not finite.all():
        example = int(index[finite.logical_not().nonzero()[0, 0]])
        raise FedlensError(
            f"The backbone's features of example {example} are not finite: "
            "check its weights, or use precision fp32."
        )
    return batch


def _recall(path: Path, count: int) -> torch.Tensor | None:
    """The `count` rows stored at `path`; None if they are missing or damaged."""
    rows = (recall(path) or {}).get("features")
    return rows if rows is not None and len(rows) == count else None
