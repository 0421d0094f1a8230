"""The audit: checks that a sceptical reader would make, on the records of the runs.

Each check reads what runs recorded (choices, journals, mask counts, results) and lists every
contradiction. A violation means that a number or a comparison must not be trusted.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from fedlens.reporting.audit import consistency
from fedlens.reporting.audit.recompute import numbers_have_runs
from fedlens.reporting.study import labels
from fedlens.reporting.study.comparison import Comparison
from fedlens.reporting.study.content import Check, Question
from fedlens.reporting.study.runs import Method, Run, Study

UNKNOWN = "no commit"
NOTHING = "nothing to check"


def audit(study: Study, tables: Sequence[Comparison], questions: Sequence[Question]) -> list[Check]:
    """All checks; a question's `audit` says which of them its tables must pass."""
    runs = study.runs
    by_name = {one.name: one for one in questions}

    def checked(name: str) -> list[Comparison]:
        return [table for table in tables if name in by_name[table.grid.question].audit]

    headlines = {one.name for one in questions if one.headline}
    return [
        _chosen_without_test(runs),
        _same_density(checked("density")),
        _same_budget(checked("budget")),
        _tuned_alike(checked("tuning"), headlines),
        numbers_have_runs(tables, runs),
        _same_inputs(study),
        _seeds(study, tables),
        _code_on_record(study),
    ]


def _chosen_without_test(runs: Sequence[Run]) -> Check:
    """Every recorded choice is the one that validation data alone gives, repeated here."""
    violations, remarks, analyses = [], [], 0
    for run in runs:
        violations += [f"{run.name}: {problem}" for problem in consistency.of_choice(run)]
        if run.folder.journal("test_curve").read():
            remarks.append(f"{run.name} recorded a test curve, which its choice does not use")
        for record in run.analyses:
            analyses += record["kind"] in consistency.CHOSEN_BY_ACCURACY
            violations += [f"{run.name}: {problem}" for problem in consistency.of_analysis(record)]
    return Check(
        "Nothing was chosen on test data",
        f"{labels.counted(len(runs), 'run')}, {labels.counted(analyses, 'analysis')} with a choice"
        ", each repeated on validation data",
        violations,
        remarks,
    )


def _same_density(tables: Sequence[Comparison]) -> Check:
    """By the number of weights that were trained, as counted during training."""
    violations: list[str] = []
    masks = 0
    for table in tables:
        for column in table.grid.columns:
            counted: dict[int | None, list[str]] = {}
            for (row, where), method in table.methods.items():
                if where != column or not labels.sparse(method):
                    continue
                for run in method.runs:
                    masks += 1
                    facts = run.result["facts"]
                    trained, total = facts.get("weights_trained"), facts.get("weights_maskable", 0)
                    counted.setdefault(trained, []).append(row)
                    if trained != round(method.get("sparse.density") * total):
                        violations.append(f"{run.name}: {trained} of {total} weights were trained")
                    if run.masks and run.masks["all"]["trained"] != trained:
                        violations.append(f"{run.name}: the counts in its mask and result differ")
            if len(counted) > 1:
                text = "; ".join(f"{n}: {', '.join(dict.fromkeys(r))}" for n, r in counted.items())
                violations.append(f"{_place(table, column)}: unequal masks ({text})")
    return Check(
        "Masks are compared at equal density",
        f"{labels.counted(masks, 'mask')} in {labels.counted(len(tables), 'table')}, by their "
        "numbers of trained weights",
        violations,
        [],
        nothing="" if masks else NOTHING,
    )


def _same_budget(tables: Sequence[Comparison]) -> Check:
    """By the steps in the journals, the clients per round, and the batch size."""
    violations: list[str] = []
    remarks: list[str] = []
    cells = 0
    for table in tables:
        spent: dict[tuple[int, int, int], list[str]] = {}
        for place, method in table.methods.items():
            if not labels.trains(method):
                continue
            cells += 1
            for run in method.runs:
                spent.setdefault(_spent(run), []).append(" / ".join(filter(None, place)))
                violations += [f"{run.name}: {problem}" for problem in consistency.of_length(run)]
        if len(spent) < 2:
            continue
        steps = [budget[0] for budget in spent]
        longest = max(
            int(method.get("federated.local_steps")) if labels.federated(method) else 1
            for method in table.methods.values()
        )
        text = "; ".join(
            f"{s} steps × batch {b} × {c} clients: {', '.join(dict.fromkeys(where))}"
            for (s, b, c), where in spent.items()
        )
        early = any(m.get("train.early_stopping") for m in table.methods.values())
        allowed = (early or max(steps) - min(steps) < longest) and len({b[1:] for b in spent}) == 1
        (remarks if allowed else violations).append(f"{table.grid.title}: {text}")
    return Check(
        "Methods are compared at equal budget",
        f"{labels.counted(cells, 'method')} in {labels.counted(len(tables), 'table')}, by the "
        "numbers of steps in metrics.jsonl",
        violations,
        remarks,
        nothing="" if cells else NOTHING,
    )


def _spent(run: Run) -> tuple[int, int, int]:
    """Steps of central training, or of a client over all rounds; batch size; clients per round."""
    config = run.config
    trained = [record for record in run.metrics if "train" in record]
    if config["federated"]["clients"] is None:
        return sum(r.get("steps", 1) for r in trained), config["train"]["batch_size"], 1
    cohort = max(len(record["participants"]) for record in trained)
    default = [config["federated"]["local_steps"]]
    steps = sum(fmean(record.get("local_steps") or default) for record in trained)
    return round(steps), config["train"]["batch_size"], cohort


def _tuned_alike(tables: Sequence[Comparison], headlines: set[str]) -> Check:
    """How many settings of learning rate and weight decay each cell was chosen among.

    An untuned row is a violation only where rows are compared, not in a headline.
    """
    violations: list[str] = []
    remarks: list[str] = []
    choices = 0
    for table in tables:
        grid = table.grid
        for place, column in enumerate(grid.columns):
            counts = {
                row: cell.candidates
                for row, cells in zip(grid.rows, grid.cells, strict=True)
                if (cell := cells[place]) and cell.lr is not None
            }
            choices += sum(count > 1 for count in counts.values())
            if len(set(counts.values())) > 1:
                text = ", ".join(f"{row} {count}" for row, count in counts.items())
                untuned = min(counts.values()) == 1 and grid.question not in headlines
                message = f"{_place(table, column)}: candidates by row: {text}"
                (violations if untuned else remarks).append(message)
        for at, rivals in table.candidates.items():
            where, best = f"{grid.title}, {' / '.join(filter(None, at))}", table.methods[at]
            if len(rivals) > 1 and best.validation is None:
                violations.append(
                    f"{where}: {len(rivals)} methods without a validation accuracy to choose by"
                )
            remarks += [
                f"{where}: a method with fewer seeds is better on validation over the shared seeds"
                for rival in rivals
                if _better(rival, best)
            ]
    if untuned_tables := [
        t.grid.title for t in tables if not any(len(r) > 1 for r in t.candidates.values())
    ]:
        remarks += [
            f"{title}: each method was run with one learning rate only, so none was tuned"
            for title in dict.fromkeys(untuned_tables)
        ]
    return Check(
        "Methods were tuned alike",
        f"{labels.counted(len(tables), 'table')}; "
        + (
            f"{labels.counted(choices, 'cell')} with several candidates, chosen on validation"
            if choices
            else "no cell had several candidates to choose from"
        ),
        violations,
        remarks,
        nothing="" if choices else "not tuned",
    )


def _better(rival: Method, best: Method) -> bool:
    """On validation, over the shared seeds."""
    shared = set(rival.seeds) & set(best.seeds)
    scores = [
        [run.validation for run in method.runs if run.seed in shared] for method in (rival, best)
    ]
    first, second = ([value for value in values if value is not None] for values in scores)
    return bool(first and second) and fmean(first) > fmean(second)


def _same_inputs(study: Study) -> Check:
    violations = []
    for setting, methods in study.settings.items():
        for what in ("data", "weights"):
            hashes = {run.manifest["inputs"].get(what) for m in methods for run in m.runs}
            if len(hashes) > 1:
                violations.append(f"{setting}: {len(hashes)} different {what}")
            needed = what == "data" or methods[0].get("backbone.pretrained")
            if None in hashes and needed:
                violations.append(f"{setting}: runs without a hash of their {what}")
    return Check(
        "All runs of a setting used the same data and weights",
        f"{labels.counted(len(study.runs), 'manifest')}, by hash",
        violations,
        [],
    )


def _seeds(study: Study, tables: Sequence[Comparison]) -> Check:
    """Contrasts are over shared seeds, and no two runs of a method are the same."""
    violations, remarks, contrasts, single = [], [], 0, 0
    for method in study.methods:
        ends = Counter(run.result["choice"]["parameters"] for run in method.runs)
        if len(set(method.seeds)) < len(method.seeds):
            violations.append(f"{_names(method)} have the same seed")
        elif labels.trains(method) and len(ends) < len(method.runs):
            violations.append(f"{_names(method)} ended in the same parameters")
    for table in tables:
        grid = table.grid
        single += sum(1 for row in grid.cells for cell in row if cell and len(cell.seeds) == 1)
        contrasts += len(grid.contrasts)
        for contrast in grid.contrasts:
            first, second = (set(table.methods[place].seeds) for place in contrast.places)
            if contrast.count != len(first & second):
                violations.append(f"{grid.title}: {contrast.row} is not paired by seed")
            elif first != second:
                remarks.append(
                    f"{grid.title}, {contrast.column}: {contrast.row} and {contrast.against} share "
                    f"{contrast.count} of {len(first | second)} seeds"
                )
    if single:
        are = "is from one seed and is" if single == 1 else "are from one seed and are"
        remarks.append(f"{labels.counted(single, 'cell')} {are} marked")
    return Check(
        "Differences are paired by seed",
        f"{labels.counted(contrasts, 'difference')} in {labels.counted(len(tables), 'table')}",
        violations,
        remarks,
        nothing="" if contrasts else NOTHING,
    )


def _code_on_record(study: Study) -> Check:
    """Uncommitted changes make a run hard to repeat, not wrong: they are a remark."""
    violations = [
        f"{run.name}: neither commit nor version is known"
        for run in study.runs
        if _commit(run) == UNKNOWN and "fedlens" not in run.manifest["sessions"][0]["versions"]
    ]
    commits = Counter(_commit(run) for run in study.runs)
    remarks = [
        f"{labels.counted(count, 'run')} from {commit}"
        for commit, count in sorted(commits.items())
        if commit == UNKNOWN or "+" in commit
    ]
    for package in ("torch", "timm"):
        versions = {run.manifest["sessions"][0]["versions"].get(package) for run in study.runs}
        if len(versions) > 1:
            remarks.append(f"{len(versions)} versions of {package}")
    if study.unfinished:
        remarks.append(
            f"unfinished and not in any table: {labels.counted(len(study.unfinished), 'run')}"
        )
    return Check(
        "The code is on record",
        f"{labels.counted(len(study.runs), 'manifest')}, {labels.counted(len(commits), 'commit')}",
        violations,
        remarks,
    )


def _names(method: Method) -> str:
    return ", ".join(run.name for run in method.runs)


def _commit(run: Run) -> str:
    return run.manifest["sessions"][0]["git"] or UNKNOWN


def _place(table: Comparison, column: str) -> str:
    return f"{table.grid.title}, {column}" if len(table.grid.columns) > 1 else table.grid.title
