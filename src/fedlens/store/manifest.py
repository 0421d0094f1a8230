"""The circumstances of a run: versions, commit, hardware, command, hashes of what went in."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedlens.errors import FedlensError

PACKAGES = ("fedlens", "torch", "torchvision", "timm", "numpy", "safetensors", "hydra-core")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def session(
    device: torch.device, *, command: list[str] | None = None, packages: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What is true of this process; a run that was resumed has several.

    `command` are the words that lead here, if not this process's own; `packages` count besides.
    """
    return {
        "started": now(),
        "command": shlex.join(command or ["fedlens", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in (*PACKAGES, *packages)},
        "git": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def check_inputs(signed: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuses other data or weights than the run began with."""
    for what, found in inputs.items():
        if signed["inputs"].get(what) != found:
            raise FedlensError(
                f"{signed['name']} began with other {what} than are here now (the hashes differ): "
                f"bring the same {what} back, or start another run under another run.name."
            )


def differences(first: dict[str, Any], later: dict[str, Any]) -> list[str]:
    """What differs between two sessions and could change the last bits of a result."""
    watched = ("versions", "git", "processor", "threads", "device")
    return [key for key in watched if first.get(key) != later.get(key)]


def git_commit(folder: Path) -> str | None:
    """The commit this code was run from, marked where the tree had changes; None outside git."""
    try:
        said = [
            subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True, text=True, timeout=10, check=True,
            ).stdout.strip()
            for words in (
                ["ls-files", "--error-unmatch", __file__],  # fails if it is another project's
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", "."],
            )
        ]  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return said[1] + ("+changes" if said[2] else "")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
