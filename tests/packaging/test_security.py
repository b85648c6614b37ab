"""SECURITY.md, sentence by sentence: malicious files for each reader of the library."""

import json
import os
import pickle
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from sentences import check_held, checks, sentences

from funcops import ChainConfig, LinearConfig, RopeConfig, Step, chain, checkpoint, dist, linear, lora, random
from funcops.engine.errors import CheckpointError
from funcops.models import DecoderConfig, decoder, from_hf, open_hf, to_hf
from funcops.optim import AdamWConfig, adamw_init

pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from lm.results import RunError, _metadata_of  # noqa: E402

ONE = dist.Mesh.abstract({"dp": 1}, 0)
TREE = {"w": torch.arange(3.0), "step": 7}
PARAMS = {"w": torch.arange(3.0)}
STATE = adamw_init(PARAMS, AdamWConfig())
SIZES = dict(vocab=32, dim=16, layers=1, heads=2, kv_heads=2, head_size=8, hidden=16, context=16)
DECODER = DecoderConfig(**SIZES, rope=RopeConfig(8), family="llama")
ADAPTED = lora.with_lora(ChainConfig(steps=(Step("up", linear, LinearConfig(4, 6)),)), 2, ["up"])
ran = []


def attack(*args):
    ran.append(args)
    return torch.zeros(3)


class Attack:
    def __reduce__(self):
        return attack, ("reduced",)


def made(root):
    """A checkpoint of each kind."""
    params = chain.init(decoder(DECODER), key=random.key(0))
    checkpoint.save(PARAMS, root / "one.safetensors")
    checkpoint.save({"params": PARAMS, "state": STATE}, root / "state.safetensors")
    dist.save(TREE, root / "many", {}, ONE)
    dist.save({"params": PARAMS, "state": STATE}, root / "many state", {}, ONE)
    dist.save({"run": {"step": "1", "settings": "{}", "rows": "[]"}}, root / "run", {}, ONE)
    to_hf(params, DECODER, root / "model")
    to_hf(params, DECODER, root / "shards", shard_bytes=2000)
    lora.save_adapter(root / "adapter", chain.init(ADAPTED, key=random.key(0)), ADAPTED)


def adapter(root):
    return lora.load_adapter(root / "adapter", chain.init(ADAPTED, key=random.key(0)), ADAPTED)


SHARD = "shards/model-00001-of-"
READERS = {  # by the file that a stranger changes
    "one.safetensors": (
        lambda root: checkpoint.load(root / "one.safetensors", PARAMS),
        lambda root: checkpoint.read_metadata(root / "one.safetensors"),
    ),
    "state.safetensors": (lambda root: checkpoint.load(root / "state.safetensors", {"params": PARAMS, "state": STATE}),),
    "model/model.safetensors": (lambda root: from_hf(root / "model"),),
    "model/config.json": (lambda root: from_hf(root / "model"),),
    "shards/model.safetensors.index.json": (lambda root: from_hf(root / "shards"),),
    SHARD: (lambda root: from_hf(root / "shards"), lambda root: open_hf(root / "shards").__enter__()),
    "adapter/adapter_model.safetensors": (adapter,),
    "adapter/adapter_config.json": (adapter,),
    "many/.metadata": (lambda root: dist.load(root / "many", TREE, {}, ONE), lambda root: dist.load_values(root / "many")),
    "many/__0_0.distcp": (lambda root: dist.load(root / "many", TREE, {}, ONE),),
    "many state/.metadata": (lambda root: dist.load(root / "many state", {"params": PARAMS, "state": STATE}, {}, ONE),),
    "run/.metadata": (lambda root: _metadata_of(root / "run"),),
    "run/__0_0.distcp": (lambda root: _metadata_of(root / "run"),),
}
CODE = {
    "a pickle": pickle.dumps(Attack()),
    "an old pickle": pickle.dumps(Attack(), protocol=0),
    "a pickle behind a length": len(pickle.dumps(Attack())).to_bytes(8, "little") + pickle.dumps(Attack()),
    "a pickle of a module": b"cthis\ns\n.",
    "a file of torch's": None,
    "python": b"import os; os.system('touch ran')",
    "nothing": b"",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    made(root)
    torch.save({"w": Attack()}, root / "torch")
    CODE["a file of torch's"] = (root / "torch").read_bytes()
    return root


@pytest.fixture
def root(originals, tmp_path, monkeypatch):
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    ran.clear()
    return tmp_path


def changed(root, name):
    return next(path for path in sorted(root.rglob("*")) if str(path.relative_to(root)).startswith(name))


@pytest.mark.turns("name", every=4)
@pytest.mark.parametrize("name", READERS)
def test_code_is_not_run(name, root):
    """Each file in turn is replaced by code of each kind; each of its readers raises, and nothing runs."""
    path, readers = changed(root, name), READERS[name]
    whole = path.read_bytes()
    for kind, data in CODE.items():
        path.write_bytes(data)
        for read in readers:
            with pytest.raises((CheckpointError, ValueError, OSError, RunError)) as raised:
                read(root)
            assert isinstance(raised.value, CheckpointError) or "json" in name, (name, kind, raised.value)
            assert not ran and "this" not in sys.modules and not os.path.exists("ran"), (name, kind)
    path.write_bytes(whole)
    for read in readers:
        read(root)


def nothing_is_downloaded(root, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    for readers in READERS.values():
        for read in readers:
            read(root)


def every_wrong_leaf_is_listed(root):
    wrong = {"w": torch.ones(4), "x": torch.ones(1)}
    for read in (
        lambda: checkpoint.load(root / "one.safetensors", wrong),
        lambda: dist.load(root / "many", {**wrong, "step": 7}, {}, ONE),
    ):
        with pytest.raises(CheckpointError, match=r"missing: x float32\[1\]\n  mis-shaped: w \[4\], got \[3\]"):
            read()


def names_outside_are_refused(root):
    index = root / "shards" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    for name in ("../one.safetensors", str(root / "one.safetensors"), "a/../../one.safetensors", "..", ""):
        said["weight_map"] = dict.fromkeys(said["weight_map"], name)
        index.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match="must be the name of a file of the folder"):
            from_hf(root / "shards")


def configs_are_checked(root):
    path = root / "model" / "config.json"
    said = json.loads(path.read_text())
    for change in ({"model_type": "no such"}, {"no_such_field": 3}, {"auto_map": {"AutoConfig": "evil.Config"}, "x": 1}):
        path.write_text(json.dumps({**said, **change}))
        with pytest.raises((TypeError, ValueError)):
            from_hf(root / "model")
    assert not any("trust_remote_code" in file.read_text() for file in (ROOT / "funcops").rglob("*.py"))


def headers_are_checked(root):
    path = root / "one.safetensors"
    for shape, end in (([2**40], 2**42), ([2**62] * 4, 2**63), ([3], 2**20)):
        text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        for length in (len(text), 2**62, 2**40):
            path.write_bytes(length.to_bytes(8, "little") + text)
            with pytest.raises(CheckpointError, match="must be a safetensors file"):
                checkpoint.load(path, PARAMS)


def links_in_a_path_are_followed(root):
    (root / "link").symlink_to(root / "one.safetensors")
    (root / "links").symlink_to(root / "many")
    assert torch.equal(checkpoint.load(root / "link", PARAMS)["w"], PARAMS["w"])
    assert dist.load_values(root / "links") == {"step": 7}
    checkpoint.save({"w": torch.zeros(3)}, root / "link")
    assert (root / "link").is_symlink() and not checkpoint.load(root / "one.safetensors", PARAMS)["w"].any()


def a_stranger_may_change_checksums(root):
    checkpoint.save({"w": torch.full((3,), 666.0)}, root / "one.safetensors")
    assert checkpoint.load(root / "one.safetensors", PARAMS, verify=True)["w"][0] == 666


def pickled_configs_are_code(root):
    """The page warns of what is so: unpickling runs code."""
    assert pickle.loads(pickle.dumps(DECODER)) == DECODER
    pickle.loads(CODE["a pickle"])
    assert ran


HOSTILE = "tests/distributed/test_hostile_checkpoints.py::"
OVER_RANKS = "tests/distributed/test_saves_of_ranks.py::"
SUMS = "tests/checkpoint/test_checksums.py::"
CODE_IS_NOT_RUN = "tests/packaging/test_security.py::test_code_is_not_run"
HELD = {  # by how each sentence, or row, begins: what holds it
    "`funcops.checkpoint`, `funcops.models` and": CODE_IS_NOT_RUN,
    "`funcops.dist` reads torch's": CODE_IS_NOT_RUN,
    "It reads the pickle as data": f"{HOSTILE}test_no_pickle_runs_code",
    "It reads tensors and numbers by": f"{HOSTILE}test_a_shard_that_holds_something_else_is_refused",
    "No code in a file is run": CODE_IS_NOT_RUN,
    "Nothing is downloaded": nothing_is_downloaded,
    "An optimiser's state is read": CODE_IS_NOT_RUN,
    "| has code, such as a pickle": CODE_IS_NOT_RUN,
    "| has code in the index": f"{HOSTILE}test_no_pickle_runs_code",
    "| lacks leaves, or has others": every_wrong_leaf_is_listed,
    "| names files outside the folder": (names_outside_are_refused, f"{HOSTILE}test_files_outside_of_the_folder_are_not_read"),
    "| is a link to another file": (
        f"{HOSTILE}test_a_link_or_a_pipe_is_no_file_of_the_folder",
        f"{HOSTILE}test_an_index_that_is_a_link_is_not_followed",
    ),
    "| holds another tensor": f"{HOSTILE}test_a_shard_that_holds_something_else_is_refused",
    "| has a `config.json`": configs_are_checked,
    "| gives sizes that are far too large": headers_are_checked,
    "| has weights that were chosen": "tests/checkpoint/test_checkpoint.py::test_round_trip",
    "The checksums that `save` writes": (
        f"{SUMS}test_a_flipped_bit_does_not_load_as_the_saved_tree",
        a_stranger_may_change_checksums,
    ),
    "Arguments are trusted": links_in_a_path_are_followed,
    "`checkpoint.save` replaces the file": (
        links_in_a_path_are_followed,
        f"{OVER_RANKS}test_what_is_no_checkpoint_is_not_replaced",
        f"{OVER_RANKS}test_a_checkpoint_or_nothing_is_replaced",
    ),
}


def test_each_sentence_has_a_test():
    check_held(
        sentences((ROOT / "SECURITY.md").read_text().partition("## What loading a checkpoint can do\n")[2].partition("\n## ")[0]),
        HELD,
    )


@pytest.mark.parametrize("check", [*checks(HELD), *checks({"": pickled_configs_are_code})])
def test_security(check, root, monkeypatch):
    given = {"root": root, "monkeypatch": monkeypatch}
    check(**{name: given[name] for name in check.__code__.co_varnames[: check.__code__.co_argcount]})


def test_the_library_unpickles_nothing_else():
    """No other file of the package calls a function that unpickles: messages between ranks, dist's own readers, and the laws, which
    pickle residuals of theirs, are all; and results of a module, whose bytes never leave the process that made them."""
    found = {
        str(path.relative_to(ROOT))
        for path in sorted((*(ROOT / "funcops").rglob("*.py"), *(ROOT / "examples").rglob("*.py")))
        if re.search(r"\b(pickle\.loads?|torch\.load|Unpickler|dcp\.load|checkpoint\.load\(.*checkpoint_id)\b", path.read_text())
    }
    assert found == {
        "funcops/adapters/nn/form.py",
        "funcops/distributed/checkpoint.py",
        "funcops/distributed/checkpoint_index.py",
        "funcops/distributed/checkpoint_shards.py",
        "funcops/testing/guarded.py",
    }
