import gc
import os

import pytest
from policy_cases import written

from funcops.engine.residuals.offload import copies


@pytest.fixture
def device(monkeypatch):
    """Treat every tensor as a device's, copied to the host's memory and back. The list has the storages of the copies."""
    made = []

    def on_host(t):
        made.append((host := t.clone()).untyped_storage())
        return host

    for name, fn in (("leaves", lambda t: True), ("on_host", on_host), ("on_device", lambda host, device: host.clone())):
        monkeypatch.setattr(copies, name, fn)
    return made


@pytest.fixture
def folder(tmp_path):
    """A folder that must be unchanged at the end."""
    (tmp_path / "funcops-notes.txt").write_text("not ours")
    yield str(tmp_path)
    gc.collect()  # an error holds the frames that it passed
    written(tmp_path)
    assert os.listdir(tmp_path) == ["funcops-notes.txt"]
