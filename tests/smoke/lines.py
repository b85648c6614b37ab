"""Lines of JSON, a line each result, printed or written as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NO_DEVICE = "no device"


class Lines:
    """Lines of results, also written to a file if one is given. A run without a device does not overwrite a device's file."""

    def __init__(self, file: Path | None, device: bool = True) -> None:
        self.file = file if device or file is None or not _of_a_device(file) else None
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("")

    def add(self, found: dict[str, Any]) -> str:
        line = json.dumps(found)
        if self.file is not None:
            with open(self.file, "a") as out:
                out.write(line + "\n")
        return line


def _of_a_device(file: Path) -> bool:
    if not file.exists():
        return False
    return any(json.loads(line)["status"] != NO_DEVICE for line in file.read_text().splitlines())
