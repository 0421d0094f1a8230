"""The audit in the paper: a line per check, and violations in red."""

from collections.abc import Sequence

from fedlens.reporting.paper import floats, prose
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import Check

VIOLATIONS = 6  # of all checks, in full; the others are counted


def checked(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [
        {
            "title": prose.tex(check.title),
            "scope": prose.tex(check.scope),
            "violations": "" if check.passed else prose.counted(len(check.violations), "violation"),
            "outcome": prose.tex(check.outcome),
            "remarks": prose.counted(len(check.remarks), "remark") if check.remarks else "",
        }
        for check in checks
    ]


def violations(checks: Sequence[Check]) -> list[str]:
    """Violations in full, one of each failed check first."""
    every = {check.title: [prose.tex(text) for text in check.violations] for check in checks}
    some = floats.shared_out(every, VIOLATIONS)
    shown = [prose.breakable(text) for texts in some.values() for text in texts]
    rest = sum(map(len, every.values())) - len(shown)
    return [
        *shown,
        *([f"{prose.counted(rest, 'more violation')} in the HTML page"] if rest else []),
    ]


def verdict(checks: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checks)
    if not checks:
        return ""
    if failed:
        count = rf"{prose.number(failed)} of {prose.counted(len(checks), 'check')}"
        return rf"\textcolor{{red}}{{The audit of the records found violations in {count}.}}"
    return f"The audit of the records found no violation: {captions.audited(checks)}."
