"""The audit in the paper: a line for each check, and every kind of violation in red."""

from collections.abc import Sequence

from fedlens.reporting.paper import floats, prose
from fedlens.reporting.study.content import Check

VIOLATIONS = 6  # of all checks, in words; the count of the others is given


def checked(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [
        {
            "title": prose.tex(check.title),
            "looked_at": prose.tex(check.looked_at),
            "faults": "" if check.passed else prose.counted(len(check.violations), "violation"),
            "remarks": prose.counted(len(check.remarks), "remark") if check.remarks else "",
        }
        for check in checks
    ]


def faults(checks: Sequence[Check]) -> list[str]:
    """Violations in words, one of each check first, so that no check is silent."""
    every = {check.title: [prose.tex(fault) for fault in check.violations] for check in checks}
    some = floats.shared_out(every, VIOLATIONS)
    told = [prose.breakable(fault) for faults in some.values() for fault in faults]
    rest = sum(map(len, every.values())) - len(told)
    return [
        *told,
        *([f"{prose.counted(rest, 'more violation')} in the HTML page"] if rest else []),
    ]


def verdict(checks: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checks)
    if not checks:
        return ""
    if failed:
        count = rf"{prose.number(failed)} of {prose.counted(len(checks), 'check')}"
        return rf"\textcolor{{red}}{{The audit of the records found violations in {count}.}}"
    return f"The audit of the records passed in {prose.counted(len(checks), 'check')}."
