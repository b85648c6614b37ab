"""What the pipelining adapter uses of torch's private names is looked for when it is imported."""

import types

import pytest
import torch
from torch.distributed import pipelining

from funcops.adapters.pipelining import private

NAMES = [(owner, name) for owner, names in private.USED.items() for name in names]


def without(owner, name):
    """The package as it would be if torch renamed one name."""
    copies = {part: types.SimpleNamespace(**vars(pipelining.schedules)) for part in ("schedules",)}
    package = types.SimpleNamespace(PipelineStage=pipelining.PipelineStage, **copies)
    head, _, last = owner.rpartition(".")
    holder = package if not head else package.schedules
    if owner == "schedules":
        delattr(package.schedules, name)
    else:
        words = private._words(getattr(holder, last)) - {name}
        setattr(holder, last, types.SimpleNamespace(**dict.fromkeys(words)))
    return package


def test_this_torch_has_them_all(recwarn):
    private.check_names(pipelining)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_name_that_is_gone_is_named(owner, name):
    with pytest.raises(
        RuntimeError, match=rf"torch must have torch.distributed.pipelining.{owner}.{name}, got {torch.__version__[:4]}"
    ):
        private.check_names(without(owner, name))


def test_an_untried_version_warns(monkeypatch):
    monkeypatch.setattr(private, "TRIED", ("1.0",))
    with pytest.warns(UserWarning, match=r"has all names that it uses of torch .*, but was tried with 1\.0 alone"):
        private.check_names(pipelining)
