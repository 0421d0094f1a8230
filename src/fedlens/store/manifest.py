"""Where a result comes from: versions, commit, hardware, command, hashes of data and weights."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedlens.errors import FedlensError
from fedlens.runtime.machine import processor

PACKAGES = ("fedlens", "torch", "torchvision", "timm", "numpy", "safetensors", "hydra-core")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def session(
    device: torch.device, *, command: list[str] | None = None, packages: tuple[str, ...] = ()
) -> dict[str, Any]:
    """How this process runs; a resumed run has a session for each time it was started.

    `command` replaces this process's own command line; the versions of `packages` are added.
    """
    return {
        "started": now(),
        "command": shlex.join(command or ["fedlens", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in (*PACKAGES, *packages)},
        "git": git_commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def check_inputs(manifest: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuses other data or weights than the run began with, by their hashes."""
    for name, digest in inputs.items():
        if manifest["inputs"].get(name) != digest:
            raise FedlensError(
                f"{manifest['name']} began with different {name} (the hashes differ): use the same "
                f"{name} again, or start another run under another run.name."
            )


def check_config(manifest: dict[str, Any], digest: str) -> None:
    """Refuses another config than the run began with; older manifests do not have its hash."""
    if manifest.get("config", digest) != digest:
        raise FedlensError(
            f"config.yaml of {manifest['name']} is not what the run began with (the hashes "
            "differ): restore it from a copy, or start another run under another run.name."
        )


def check_plugins(manifest: dict[str, Any], used: dict[str, Any]) -> None:
    """Refuses rows from other files than the run began with, by their hashes."""
    before = manifest.get("plugins", {})
    for key, plugin in {**before, **used}.items():
        if before.get(key) != used.get(key):
            raise FedlensError(
                f"{manifest['name']} began with another {plugin['file']} (for {key}; the hashes "
                "differ): load the copy in its folder plugins/, or start another run under another "
                "run.name."
            )


def differences(first: dict[str, Any], later: dict[str, Any]) -> list[str]:
    """The keys that differ between two sessions and may change the last bits of a result."""
    relevant = ("versions", "git", "processor", "threads", "device")
    return [key for key in relevant if first.get(key) != later.get(key)]


@cache  # the code of a process is the code it loaded
def git_commit() -> str | None:
    """The commit of this code, marked if there are uncommitted changes; None outside git."""
    folder = Path(__file__).parent
    try:
        _, commit, changes = [
            subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True, text=True, timeout=10, check=True,
            ).stdout.strip()
            for arguments in (
                ["ls-files", "--error-unmatch", __file__],  # fails if it is not in this repository
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", "."],
            )
        ]  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
