"""Two tables of facts laid side by side: near each other on any machine, equal bits on one."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden import sketches

TOLERANCE = 1e-6  # relative; of projections, relative to the norm
# Another kind of CPU rounds otherwise; fitted temperatures and heads trained for long show it most.
ELSEWHERE = 1e-3
AMPLIFIED = 5e-2  # of runs that enlarge rounding: a loss of 30, or masks found in several rounds
FLIPPED = 1e-3  # where masks differ by a few weights whose scores are nearly equal
JUMPY = {"sign_agreement", "sign_conflict", "sign_conflict_of_all"}  # many updates are nearly 0
SIGNS = 5e-3  # relative, of these
OVERLAP = 0.999  # of masks
OVERLAP_AMPLIFIED = 0.99
COUNTED = ("_top1", "_top5")  # shares of a hundred examples or more: rounding may tip one of them
ONE_EXAMPLE = 0.0101
HASH = "sha256"  # of floats: these bits depend on the machine


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def near(found: Any, expected: Any, tolerance: float = TOLERANCE) -> list[str]:
    """What differs by more than rounding; what is expected must be there, more may be."""
    if isinstance(expected, dict) and "masks" in expected:
        one, other = (facts.get("masks", {}).get(HASH) for facts in (found, expected))
        tolerance = tolerance if one == other else max(tolerance, FLIPPED)
    return list(_near(found, expected, tolerance, ""))


def equal(found: Any, expected: Any) -> list[str]:
    """What differs at all."""
    return list(_near(found, expected, 0.0, "", bits=True))


def _near(
    found: Any, expected: Any, tolerance: float, where: str, *, bits: bool = False
) -> Iterator[str]:
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            yield f"{where}: {found!r}, not a map"
            return
        if "projections" in expected and not bits:
            yield from _near_sketch(found, expected, tolerance, where)
            return
        if "sampled_bits" in expected and not bits:
            overlap = OVERLAP_AMPLIFIED if tolerance >= AMPLIFIED else OVERLAP
            yield from _near_masks(found, expected, where, overlap)
            return
        for key, value in expected.items():
            place = f"{where}.{key}" if where else key
            if key not in found:
                yield f"{place}: missing"
            elif bits or key != HASH:
                allowed = max(tolerance, SIGNS) if key in JUMPY and not bits else tolerance
                if not bits and tolerance >= FLIPPED and key.endswith(COUNTED):
                    if abs(found[key] - value) > ONE_EXAMPLE:
                        yield f"{place}: {found[key]!r}, not {value!r}"
                    continue
                yield from _near(found[key], value, allowed, place, bits=bits)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f"{where}: {found!r}, not {expected!r}"
            return
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _near(one, other, tolerance, f"{where}[{place}]", bits=bits)
    elif isinstance(expected, float) and isinstance(found, float | int):
        # A number near 0 is a difference of numbers near 1, whose last bits it has.
        if not math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance / 100):
            yield f"{where}: {found!r}, not {expected!r}"
    elif found != expected:
        yield f"{where}: {found!r}, not {expected!r}"


def _near_sketch(found: Any, expected: Any, tolerance: float, where: str) -> Iterator[str]:
    norm = expected["norm"]
    pairs = [(found["norm"], norm)]
    pairs += zip(found["projections"], expected["projections"], strict=True)
    furthest = max(abs(one - other) for one, other in pairs)
    if furthest > tolerance * norm:
        yield f"{where}: off by {furthest / norm:.1e} of the norm"


def _near_masks(found: Any, expected: Any, where: str, overlap: float) -> Iterator[str]:
    for key in ("trained", "total"):
        if found[key] != expected[key]:
            yield f"{where}.{key}: {found[key]}, not {expected[key]}"
    shared = sketches.overlap(found["sampled_bits"], expected["sampled_bits"])
    if shared < overlap:
        yield f"{where}: {shared:.4f} of the weights are shared"
    counts = zip(found["trained_by_tensor"], expected["trained_by_tensor"], strict=True)
    if sum(abs(one - other) for one, other in counts) > 2 * (1 - overlap) * expected["trained"]:
        yield f"{where}.trained_by_tensor: {found['trained_by_tensor']}"
