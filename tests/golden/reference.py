"""The table at another commit and here, on this machine, bit for bit.

    python tests/golden/reference.py --commit REV

checks REV out into a folder of its own, lives that commit's table there with that commit's package,
writes what came of it (by default below .golden/, which git is to ignore), then lives the table of
the present tree and compares. Exits with 1 if a bit differs. With --keep an existing file is used.
Then `FEDLENS_GOLDEN_REFERENCE=FILE pytest tests/golden` compares bits, too.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.golden import compare  # noqa: E402


def live(tree: Path, file: Path) -> None:
    """The table of that tree, by its own package: PYTHONPATH goes before what is installed."""
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "tests.golden.runs", str(file)]
    done = subprocess.run(
        words, cwd=tree, env=surroundings, stdout=subprocess.PIPE, text=True, check=False
    )
    said = done.stdout.splitlines()
    if done.returncode:
        sys.exit(f"The table of {tree} failed: see above.")
    # The first line says whose package it was; another's numbers would prove nothing.
    if Path(said[0].removeprefix("with ")).resolve() != (tree / "src" / "fedlens").resolve():
        sys.exit(f"{tree} was lived {said[0]}: its own package was not found first.")


def of_commit(commit: str, file: Path) -> None:
    with TemporaryDirectory(prefix="golden-") as folder:
        tree = Path(folder, "tree")
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
            cwd=ROOT,
            check=True,
        )
        try:
            live(tree, file)
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True
            )


def revision(commit: str) -> str:
    words = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() or sys.exit(f"There is no commit {commit} here.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True, help="that has this folder of tests")
    parser.add_argument("--out", type=Path, help="the reference; else .golden/COMMIT.json")
    parser.add_argument("--keep", action="store_true", help="use the reference if it is there")
    parser.add_argument("--only", action="store_true", help="make the reference, do not compare")
    asked = parser.parse_args()
    commit = revision(asked.commit)
    file = (asked.out or ROOT / ".golden" / f"{commit[:12]}.json").resolve()
    if not (asked.keep and file.exists()):
        of_commit(commit, file)
    print(f"reference {file}")
    if asked.only:
        return 0
    with TemporaryDirectory(prefix="golden-") as folder:
        here = Path(folder, "here.json")
        live(ROOT, here)
        found, expected = compare.read(here), compare.read(file)
    return report(found, expected)


def report(found: dict[str, object], expected: dict[str, object]) -> int:
    width = max(map(len, expected))
    wrong = 0
    for name, facts in expected.items():
        faults = compare.equal(found[name], facts) if name in found else ["not in the table"]
        wrong += bool(faults)
        print(f"{name:{width}}  {'equal' if not faults else f'{len(faults)} differ: {faults[0]}'}")
    print(f"{len(expected) - wrong} of {len(expected)} are equal, bit for bit")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
