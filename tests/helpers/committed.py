"""The figures committed under docs/benchmarks."""

import json
from pathlib import Path

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def committed(name):
    """{(case, provider, metric): value} of the file `name`."""
    rows = json.loads((COMMITTED / f"{name}.json").read_text())["rows"]
    return {(row["case"], row["provider"], row["metric"]): row["value"] for row in rows}
