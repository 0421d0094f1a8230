"""A partition of the data among clients as a table in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

MEASURES = ("min", "mean", "max")


def partition_table(record: Mapping[str, Any]) -> Table:
    """How many samples and classes clients hold, and how skewed their labels are."""
    statistics = record["statistics"]
    title = f"{record['name']}: {statistics['samples']} examples, {statistics['clients']} clients"
    table = Table("", *MEASURES, title=title, box=None)
    for name, values in statistics["summary"].items():
        table.add_row(name.replace("_", " "), *(f"{values[key]:.4g}" for key in MEASURES))
    return table
