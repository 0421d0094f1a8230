"""The records of finished runs as one archive, small enough to publish. No torch.

An archive has all that a report and its audit read. It leaves out checkpoints, clients' updates,
mask tensors and log.txt, which names paths of the machine.
"""

from dataclasses import dataclass
from pathlib import Path

from fedlens.errors import FedlensError
from fedlens.files import clear_partials
from fedlens.store.archive import SUFFIX, pack
from fedlens.store.records import read_record
from fedlens.store.run_folder import CLOCK, Journal, RunFolder, runs

RECORDS = ("config.yaml", "*.json", "*.jsonl", "arithmetic/*/record.json")


@dataclass(frozen=True)
class Export:
    """What was written to an archive, by names of runs."""

    written: list[str]
    kept: list[str]  # runs that were in the archive before, and only there
    unfinished: list[str]  # left out


def write_records(root: Path, archive: Path) -> Export:
    """Writes the records of all finished runs of `root` to an archive.

    Runs that an existing archive has are kept; the records of a run that is also in `root` are
    replaced, unless it ended in other parameters.
    """
    if not archive.name.endswith(SUFFIX) or archive.is_dir():
        raise FedlensError(f"{archive} is not a name of an archive: write NAME{SUFFIX}.")
    all_runs = runs(root)
    finished = [run for run in all_runs if _is_finished(run)]
    if not finished:
        raise FedlensError(f"There are no finished runs in {root}: name a folder that has some.")
    present = {run.name: run for run in runs(archive)} if archive.exists() else {}
    for run in finished:
        if run.name in present and _outcome(run) != _outcome(present[run.name]):
            raise FedlensError(
                f"{archive} has another run named {run.name}, which ended in other parameters: "
                "write to another archive, or delete that one first."
            )
    chosen = present | {run.name: run for run in finished}
    clear_partials(archive.parent, of=archive.name)
    pack({name: path for run in chosen.values() for name, path in _records(run)}, archive)
    return Export(
        written=[run.name for run in finished],
        kept=sorted(present.keys() - {run.name for run in finished}),
        unfinished=[run.name for run in all_runs if run not in finished],
    )


def _is_finished(run: RunFolder) -> bool:
    """Whether a run has a result; refuses one whose records are damaged."""
    if run.result is None:
        return False
    with run.named_in_errors():
        run.read_config()
        for pattern in ("*.json", "arithmetic/*/record.json"):
            for path in run.path.glob(pattern):
                read_record(path)
        for path in run.path.glob("*.jsonl"):
            if path.stem != CLOCK:
                Journal(path).read()
    return True


def _records(run: RunFolder) -> list[tuple[str, Path]]:
    return [
        (f"{run.name}/{path.relative_to(run.path).as_posix()}", path)
        for pattern in RECORDS
        for path in run.path.glob(pattern)
        if path.is_file() and path.stat().st_size  # else a journal without records
    ]


def _outcome(run: RunFolder) -> object:
    """The parameters a run ended in, and how they were chosen."""
    return (run.result or {}).get("choice")
