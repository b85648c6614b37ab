"""Defaults are promises: what a config, or a function of the package, takes where nothing is said stands in a table, and which
fields of a config may be given by position, and what an op keeps for its backward.

A change of one is a change of a public name, and gets a line in the changelog: `python tests/contract/test_promised_defaults.py`
writes the table anew.
"""

import dataclasses
import inspect
from pathlib import Path

import pytest

import funcops
from funcops.engine.contract.by_config import classes_of
from funcops.engine.contract.configs import OpConfig

TABLE = Path(__file__).parents[1] / "helpers" / "promised_defaults.txt"
ROOMS = (
    "",
    "dist",
    "graphs",
    "invariant",
    "logs",
    "lora",
    "low_precision",
    "models",
    "optim",
    "precision",
    "random",
    "schedule",
    "testing",
)


def defaults():
    """The defaults of every public class and function, by `room.name`; the fields that a config takes by position; and the fields
    of an op's residuals and pending, for each of the classes among which its config chooses."""
    found = {}
    for room in ROOMS:
        module = getattr(funcops, room) if room else funcops
        for name in sorted({*dir(module), *getattr(module, "__all__", ())}):  # also what is imported later
            value = getattr(module, name)
            if isinstance(value, funcops.Op):
                first, others = classes_of(value.keeps)
                of = {"keeps": [first, *others], "pending": [value.pending]}
                said = {what: [" ".join(leaves(one)) for one in classes if leaves(one)] for what, classes in of.items()}
                found |= {f"{room}.{name} {what}".lstrip("."): "; ".join(kinds) for what, kinds in said.items() if kinds}
            if name.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            if not value.__module__.startswith("funcops."):
                continue
            try:
                parameters = inspect.signature(value).parameters.values()
            except ValueError:
                continue
            said = [f"{p.name}={shown(p.default)}" for p in parameters if p.default is not p.empty]
            if said:
                found[f"{room}.{name}".lstrip(".")] = ", ".join(said)
            placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            if placed and inspect.isclass(value) and issubclass(value, OpConfig):
                found[f"{room}.{name} by position".lstrip(".")] = ", ".join(placed)
    return found


def leaves(kept):
    """The fields of a class of residuals or pendings, without what each of them has."""
    fields = dataclasses.fields(kept) if dataclasses.is_dataclass(kept) else ()
    return [field.name for field in fields if field.name not in ("cfg", "needs", "_marks")]


def shown(value):
    """A default as text that is the same in every process."""
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or len(text) > 80 else text


def test_defaults_equal_the_table():
    committed = dict(line.partition(": ")[::2] for line in TABLE.read_text().splitlines())
    now = defaults()
    assert len(now) > 150
    assert {name: (committed.get(name), said) for name, said in now.items() if committed.get(name) != said} == {}
    assert sorted(committed.keys() - now.keys()) == []


@pytest.mark.parametrize(("value", "said"), [(1.0, "1.0"), (None, "None"), (object(), "<object>"), ("x" * 90, "<str>")])
def test_a_default_is_shown_the_same_in_every_process(value, said):
    assert shown(value) == said


if __name__ == "__main__":
    TABLE.write_text("".join(f"{name}: {said}\n" for name, said in defaults().items()))
