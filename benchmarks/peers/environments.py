"""The peers' environments, each with its own packages and without fedlens, made by uv on demand.

Run: python benchmarks/peers/environments.py (the benchmarks do so themselves).
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".envs"
PEERS = ("flower", "pfl")


def python_of(peer: str) -> Path:
    """The interpreter of `peer`; its environment is made first if absent or if its pins changed."""
    folder = ENVIRONMENTS / peer
    pins = HERE / f"requirements-{peer}.txt"
    stamp = folder / "installed.txt"
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != pins.read_text():
        print(f"preparing the environment of {peer} in {folder}", file=sys.stderr)
        uv = _uv()
        subprocess.run(
            [uv, "venv", "--quiet", "--clear", "--python", platform.python_version(), folder],
            check=True,
        )
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, "--requirement", pins],
            check=True,
        )
        shutil.copyfile(pins, stamp)
    return python


def _uv() -> Path | str:
    beside = Path(sys.executable).parent / "uv"
    if beside.is_file():
        return beside
    if found := shutil.which("uv"):
        return found
    raise SystemExit("uv is needed to prepare the peers' environments: pip install uv")


if __name__ == "__main__":
    for peer in PEERS:
        print(python_of(peer))
