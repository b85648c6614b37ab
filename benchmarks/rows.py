"""Files of results, read, and written so that a process that is killed loses no result that was written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a device's file: JSON with rows, or a line of JSON each. A file that is not there has none."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return json.loads(text)["rows"] if text.startswith('{"machine"') else [*_last_lines(text).values()]


def lines_of(path: str | Path) -> dict[str, dict[str, Any]]:
    """The lines of JSON of a file by their first field, which names what was run: the last line of each."""
    return _last_lines(Path(path).read_text() if Path(path).exists() else "")


def _last_lines(text: str) -> dict[str, dict[str, Any]]:
    whole = text.splitlines()[: text.count("\n")]  # without a line that was being written when its process was killed
    return {next(iter(line.values())): line for line in map(json.loads, whole)}


def device_of(path: str | Path) -> str | None:
    """The device that a file of JSON with rows names."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return json.loads(text)["machine"].get("device") if text.startswith('{"machine"') else None


def write_whole(path: str | Path, text: str) -> None:
    """Write a file in one step: a process that is killed leaves the old file or the new one."""
    beside = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)
