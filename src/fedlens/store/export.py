"""The records of finished runs without what only a run needs to go on: small enough to publish.

What stays behind: checkpoints, clients' updates, masks bit by bit, and log.txt, which names places
of the machine. What is copied is all that a report and its audit read; places that a command named
(`run.root=/home/me/runs`) are in it. No torch.
"""

import shutil
from pathlib import Path

from fedlens.errors import FedlensError
from fedlens.files import clear_partials, replacing
from fedlens.store.run_folder import RunFolder, runs

KEPT = ("config.yaml", "*.json", "*.jsonl", "arithmetic/*/record.json")


def copy_records(root: Path, out: Path) -> tuple[list[str], list[str]]:
    """Names of the runs below `root` whose records are now below `out`, and of unfinished ones."""
    found = runs(root)
    if not found:
        raise FedlensError(f"There are no runs in {root}: name a folder that holds some.")
    if root.resolve() == out.resolve():
        raise FedlensError(f"{out} holds the runs themselves: name another folder for the records.")
    finished = [run for run in found if run.result is not None]
    if taken := [run.name for run in finished if (out / run.name / "checkpoints").exists()]:
        raise FedlensError(
            f"{out / taken[0]} is a run with checkpoints, not a copy of records: name another "
            "folder for the records."
        )
    clear_partials(out)
    for run in finished:
        with replacing(out / run.name) as folder:
            _copy(run, folder)
    return [run.name for run in finished], [run.name for run in found if run not in finished]


def _copy(run: RunFolder, folder: Path) -> None:
    for pattern in KEPT:
        for path in run.path.glob(pattern):
            target = folder / path.relative_to(run.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.stat().st_size:  # journals that nothing was written to
                shutil.copyfile(path, target)
