"""A partition of the data among clients as a table in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedlens.runtime.units import counted

MEASURES = ("min", "mean", "max")
NAMES = {"sizes": "images per client", "emd": "distance from all labels (0 to 1)"}


def partition_table(record: Mapping[str, Any]) -> Table:
    """How many samples and classes clients hold, and how skewed their labels are."""
    statistics = record["statistics"]
    images = counted(statistics["samples"], "image")
    title = f"partition {record['name']}: {images}, {counted(statistics['clients'], 'client')}"
    table = Table("", *MEASURES, title=title, title_justify="left", box=None)
    for name, values in statistics["summary"].items():
        table.add_row(
            NAMES.get(name, name.replace("_", " ")), *(f"{values[key]:.4g}" for key in MEASURES)
        )
    return table
