"""Lines of JSON, a line each result, printed or written as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import lines_of, write_whole

NO_DEVICE, OUT_OF_TIME = "no device", "out of time"
NOT_RUN = NO_DEVICE, OUT_OF_TIME


class Lines:
    """Lines of results, whose first field names what was run, each appended to a file, if one is given, as it comes. An earlier
    line of the same name counts until then, and what was not run replaces no result."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.earlier = file, {} if file is None else lines_of(file)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, "".join(json.dumps(line) + "\n" for line in self.earlier.values()))

    def add(self, found: dict[str, Any]) -> str:
        line, known = json.dumps(found), next(iter(found.values())) in self.earlier
        if self.file is not None and not (known and found["status"] in NOT_RUN):
            with open(self.file, "a") as out:
                out.write(line + "\n")
        return line
