"""Adapters in files: written to and read from PEFT's, and corrupted."""

import dataclasses
import itertools
import json
import re

import pytest
import safetensors
import torch
from lora_model import MODULES, NAMES, base_config, drawn, ours, plain, same_bits, theirs
from safetensors.torch import load_file, save_file

from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import put, tree_map_tensors
from funcops.lora import adapter, load_adapter, lora_init, merge, save_adapter, with_adapter_of, with_lora
from funcops.lora.settings import WITHOUT_MEANING, is_target

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_files_go_to_and_from_peft(stacked, tmp_path):
    _, cfg, params = ours(stacked=stacked, dtype=torch.float32)
    save_adapter(tmp_path / "ours", params, cfg, names=NAMES)
    model = theirs(cfg, params).float()
    model.save_pretrained(tmp_path / "theirs")
    files = [tmp_path / who / "adapter_model.safetensors" for who in ("ours", "theirs")]
    with safetensors.safe_open(files[0], "pt") as file:
        sums = len(json.dumps(file.metadata()["funcops.checksums"]))
    assert abs(files[0].stat().st_size - sums - files[1].stat().st_size) < 200
    for who in ("ours", "theirs"):
        fresh = lora_init(merge(params, cfg), cfg, key=random.key(9))
        assert same_bits(adapter(load_adapter(tmp_path / who, fresh, cfg, names=NAMES), cfg), adapter(params, cfg)), who
    read = peft.PeftModel.from_pretrained(plain().float(), tmp_path / "ours")
    want = {name: t for name, t in model.state_dict().items() if "lora_" in name}
    got = {name: t for name, t in read.state_dict().items() if "lora_" in name}
    assert got.keys() == want.keys() and same_bits(got, want)
    assert next(m for m in read.modules() if hasattr(m, "scaling")).scaling == {"default": 2.0}


def test_two_ranks_in_one_file(tmp_path):
    base = base_config()
    cfg = with_lora(with_lora(base, 2, ("*.q.proj",), alpha=4), 3, ("*.out", "*.down"), alpha=3)
    params = drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg)
    save_adapter(tmp_path, params, cfg, names=NAMES, base="here")
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["r"] == 3 and said["rank_pattern"] == {"blocks.0.attn.q": 2, "blocks.1.attn.q": 2}
    assert same_bits(load_adapter(tmp_path, params, cfg, names=NAMES), params)
    read = peft.PeftModel.from_pretrained(plain().float(), tmp_path)
    layers = {n: (m.r["default"], m.scaling["default"]) for n, m in read.named_modules() if hasattr(m, "scaling")}
    assert {n.rpartition(".")[2]: found for n, found in layers.items()} == {"q": (2, 2.0), "out": (3, 1.0), "down": (3, 1.0)}


def edited(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors_edited(change):
    def edit(folder):
        from safetensors.torch import load_file, save_file

        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return edit


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


Q = "base_model.model.blocks.1.attn.q.lora_A.weight"
SPOILED = {
    "missing": (tensors_edited(lambda t: t.pop(Q)), CheckpointError, f"missing: {Q}"),
    "extra": (tensors_edited(lambda t: t.update(more=torch.ones(1))), CheckpointError, "extra: more"),
    "mis-shaped": (tensors_edited(lambda t: t.update({Q: torch.ones(2, 16)})), CheckpointError, r"mis-shaped: .* got \[2, 16\]"),
    "mis-typed": (
        tensors_edited(lambda t: t.update({Q: t[Q].half()})),
        CheckpointError,
        "dtype must be given, as .* has torch.float16",
    ),
    "cut off": (cut("adapter_model.safetensors"), CheckpointError, "must be a safetensors file"),
    "config cut off": (cut("adapter_config.json"), CheckpointError, "adapter_config.json must be JSON"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), FileNotFoundError, "adapter_config.json"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), FileNotFoundError, "adapter_model"),
    "rank": (edited(r=4), CheckpointError, r"r of blocks\.0\.attn\.q must be 3, as in cfg, got 4"),
    "alpha": (edited(lora_alpha=7), CheckpointError, "lora_alpha of .* must be 6, as in cfg, got 7"),
    "dora": (edited(use_dora=True), CheckpointError, "use_dora must be False, got True"),
    "rslora": (edited(use_rslora=True), CheckpointError, r"lora_alpha of .* must be 3.464\d*, as in cfg, got 6"),
    "rslora of a word": (edited(use_rslora="yes"), CheckpointError, "use_rslora must be True or False, got 'yes'"),
    "bias": (edited(bias="all"), CheckpointError, "bias must be 'none', got 'all'"),
    "patterns of ranks": (
        edited(rank_pattern=["q"]),
        CheckpointError,
        r"rank_pattern must be None or an object of patterns, got \['q'\]",
    ),
    "a pattern of alphas": (
        edited(alpha_pattern={"(": 1}),
        CheckpointError,
        r"alpha_pattern must be None or an object of patterns, got",
    ),
    "a pattern of targets": (
        edited(target_modules="("),
        CheckpointError,
        r"target_modules must be None, a list .*or a pattern, got '\('",
    ),
    "excluded numbers": (
        edited(exclude_modules=[1]),
        CheckpointError,
        r"exclude_modules must be None, a list .*or a pattern, got \[1\]",
    ),
    "kind": (edited(peft_type="IA3"), CheckpointError, "peft_type must be 'LORA', got 'IA3'"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    _, cfg, params = ours(dtype=torch.float32)
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder, params, cfg, names=NAMES)
    return folder, cfg, params


@pytest.mark.parametrize("name", SPOILED)
def test_nothing_of_a_spoiled_folder_is_loaded(name, saved, tmp_path):
    spoil, error, message = SPOILED[name]
    folder, cfg, params = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert load_adapter(tmp_path, params, cfg, names=NAMES) is not None
    spoil(tmp_path)
    before = tree_map_tensors(torch.clone, params)
    with pytest.raises(error, match=message):
        load_adapter(tmp_path, params, cfg, names=NAMES)
    assert same_bits(params, before)


NAN = float("nan")
PATTERNS = [{"(": 1}, {"a": []}, {"a": 10**400}, {"blocks": 2**60}, {"": -1}, {".*": NAN}, {"x{99999999999}": 1}]
VALUES = [None, True, 0, -1, 2**60, 10**400, 1.5, NAN, 1e308, "", "x", "(", "\ud800", [], [1], [None], [[]], ["x"], {}, *PATTERNS]
FIELDS = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "use_rslora",
)


@pytest.mark.turns("field")
@pytest.mark.parametrize("field", [*FIELDS, "peft_type", "bias", "task_type", "fan_in_fan_out"])
def test_a_setting_of_any_value_is_read_or_refused_by_name(field, saved, tmp_path):
    """The same adapter, or an error that names the file."""
    folder, cfg, params = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path, base = tmp_path / "adapter_config.json", base_config()
    said = json.loads(path.read_text())
    for value, more in itertools.product(VALUES, ({}, {"use_rslora": True})):
        path.write_text(json.dumps(said | more | {field: value}))
        for read in (
            lambda: load_adapter(tmp_path, params, cfg, names=NAMES),
            lambda: with_adapter_of(base, tmp_path, names=NAMES),
        ):
            try:
                found = read()
            except CheckpointError as error:
                assert str(tmp_path) in str(error) and " must be " in str(error), (value, error)
            else:
                assert not isinstance(found, dict) or same_bits(found, params), value


@pytest.mark.parametrize("text", ["[" * 100_000, '{"r": ' + "9" * 5000 + "}", "\udcff", "[]", "3", "", "null"])
def test_settings_that_are_no_json_object_are_refused(text, saved, tmp_path):
    _, cfg, params = saved
    (tmp_path / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="adapter_config.json must be "):
        load_adapter(tmp_path, params, cfg, names=NAMES)


def test_a_failed_write_leaves_the_folder_unchanged(saved, tmp_path):
    _, cfg, params = saved
    save_adapter(tmp_path, params, cfg, names=NAMES)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = put(params, "blocks.1.attn.out.both.lora.b", torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"adapter\['blocks.1.attn.out'\].b must be \[16, 3\], got \[3, 3\]"):
        save_adapter(tmp_path, bad, cfg, names=NAMES)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


THREE = {"up": ("m1", "m2", "m3")}


@pytest.mark.parametrize("own", [False, True], ids=["one a", "an a each"])
def test_some_of_three_modules_of_a_linear(own, tmp_path):
    """The rows of b of the one that PEFT left as it is are zero, whether the others have one a or each its own."""
    base = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 6)),))
    cfg = with_lora(base, 2, ("up",))
    save_adapter(tmp_path, drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg), cfg, names=THREE)
    held = load_file(tmp_path / "adapter_model.safetensors")
    left = {name: t + own * (".m1." in name) for name, t in held.items() if ".m2." not in name}
    save_file(left, tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["m1", "m3"]}))
    found = with_adapter_of(base, tmp_path, names=THREE)
    assert found == with_lora(base, 4 if own else 2, ("up",))
    loaded = load_adapter(tmp_path, chain.init(found, key=random.key(2)), found, names=THREE)
    low = loaded["up"]["both"]["lora"]
    parts = [left[f"base_model.model.{m}.lora_B.weight"] @ left[f"base_model.model.{m}.lora_A.weight"] for m in ("m1", "m3")]
    torch.testing.assert_close(low.b @ low.a, torch.cat([parts[0], torch.zeros(2, 4), parts[1]]))


def test_two_modules_of_one_name_are_not_written(tmp_path):
    _, cfg, params = ours(dtype=torch.float32)
    with pytest.raises(ValueError, match="save_adapter: names must be a name for each adapter, got model for blocks.0"):
        save_adapter(
            tmp_path,
            params,
            cfg,
            names={"blocks.0.attn.qkv.q.proj": "model", "blocks.0.attn.qkv.v.proj": "model", "blocks.*": "b*"},
        )
    assert not list(tmp_path.iterdir())


OTHERS = {  # values besides the default of PEFT's settings other than bools
    "task_type": ["CAUSAL_LM"],
    "auto_mapping": [{"base_model_class": "PlainLlama"}],
    "peft_version": ["0.1"],
    "base_model_name_or_path": ["x"],
    "revision": ["main"],
    "r": [2, 5],
    "exclude_modules": [["head"]],
    "lora_alpha": [3, 12],
    "lora_dropout": [0.5],
    "bias": ["all", "lora_only"],
    "modules_to_save": [["head"]],
    "layers_to_transform": [[0], [0, 1]],
    "layers_pattern": ["blocks"],
    "rank_pattern": [{"q": 2}],
    "alpha_pattern": [{"q": 1}],
    "megatron_core": ["other"],
    "init_lora_weights": [
        False,
        "gaussian",
        "eva",
        "olora",
        "pissa",
        "pissa_niter_4",
        "corda",
        "loftq",
        "orthogonal",
        "mica",
        "lora_ga",
    ],
    "trainable_token_indices": [[1, 2], {"embed": [1]}],
    "alora_invocation_tokens": [[1, 2]],
    "qalora_group_size": [8],
    "layer_replication": [[[0, 1], [0, 1]]],
    "target_parameters": [["blocks.0.attn.q.weight"]],
    "target_modules": [["head", *MODULES], "all-linear"],
    "megatron_config": [{"tp": 2}],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"cov_file": "x"}],
    "lora_ga_config": [{"direction": "ArBr"}],
    "velora_config": [{"group": 2}],
    "monteclora_config": [{"samples": 2}],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 0.1}],
}


SAID = {
    "r": ["r of"],
    "rank_pattern": ["r of"],
    "alpha_pattern": ["lora_alpha of"],
    "use_rslora": ["lora_alpha of"],
}  # which setting an error names
NEEDS_MORE = {("task_type", "CAUSAL_LM")}  # PEFT wants more of the model than our plain one has


def settings():
    """Every field of PEFT's config with every value that OTHERS names, or both values of a bool; and a field of a future PEFT."""
    fields = {f.name: f.default for f in dataclasses.fields(peft.LoraConfig)}
    unknown = {name for name, default in fields.items() if not isinstance(default, bool)} - {*OTHERS, "peft_type", "runtime_config"}
    assert not unknown, f"name values of PEFT's new settings in OTHERS: {sorted(unknown)}"
    for name, default in fields.items():
        marks = pytest.mark.slow if name in WITHOUT_MEANING else ()  # PEFT loads each of them, to say the same
        for value in OTHERS.get(name, [True, False] if isinstance(default, bool) else []):
            yield pytest.param(name, value, marks=marks)
    yield from (("of_tomorrow", value) for value in (None, False, [], True, 1, "x"))


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory):
    """An adapter that PEFT wrote, and its logits."""
    _, cfg, params = ours(rank=4, alpha=8.0, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("of_peft")
    theirs(cfg, params, 4, 8.0).float().save_pretrained(folder)
    return folder, cfg, params


@pytest.mark.parametrize(("name", "value"), list(settings()), ids=str)
def test_a_setting_is_served_as_peft_does_or_refused_by_name(name, value, of_peft, tmp_path):
    """For every linear the adapter loaded here is the same function of x as the one that PEFT loads, or loading raises."""
    folder, cfg, params = of_peft
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edited(**{name: value})(tmp_path)
    try:
        loaded = load_adapter(tmp_path, lora_init(merge(params, cfg), cfg, key=random.key(9)), cfg, names=NAMES)
    except CheckpointError as error:
        assert re.match(rf"load_adapter: .*(\b{name}\b|{'|'.join(SAID.get(name, ['!']))})", str(error)), error
        return
    assert same_bits(adapter(loaded, cfg), adapter(params, cfg))
    if name == "of_tomorrow" or (name, str(value)) in NEEDS_MORE:
        return
    base = plain().float()
    before = {n: t.clone() for n, t in base.named_parameters()}
    model = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    linears = [m for m in model.modules() if hasattr(m, "scaling")]
    assert linears and {m.scaling["default"] for m in linears} == {2.0}
    for n, t in model.named_parameters():
        n = n.removeprefix("base_model.model.").replace(".base_layer", "")
        assert n not in before or t.equal(before[n]), f"PEFT changes {n} of the base under {name}={value}"
    x = torch.randn(4, linears[0].in_features)
    q, lora = linears[0], next(iter(adapter(loaded, cfg).values()))
    torch.testing.assert_close(q(x), q.base_layer(x) + 2.0 * x @ lora.a.T @ lora.b.T)


@pytest.mark.parametrize("alpha", [0.123456789, 16 / 3, 1e-9, 7.0])
def test_an_alpha_is_written_to_nine_decimals(alpha, tmp_path):
    cfg = with_lora(base_config(), 3, ("*.out",), alpha=alpha)
    save_adapter(tmp_path, lora_init(chain.init(base_config(), key=random.key(0)), cfg, key=random.key(1)), cfg)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == round(alpha, 9)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, "up down"),
        ({"target_modules": "all-linear"}, "up down"),
        ({"target_modules": "all-linear", "exclude_modules": ["down"]}, "up"),
        ({"target_modules": r".*\.up"}, "up"),
        ({"target_modules": ["up"], "exclude_modules": r".*up"}, ""),
        ({"target_modules": ["p"]}, ""),
    ],
    ids=str,
)
def test_targets_are_ends_of_names_or_patterns_or_all(said, wanted):
    assert [name for name in ("up", "down") if is_target(said, f"model.layers.0.{name}")] == wanted.split()


def test_a_file_of_other_names_says_which_argument_helps(saved, tmp_path):
    _, cfg, params = saved
    save_adapter(tmp_path, params, cfg, names={"blocks.*": "of.*"})
    said = r"load_adapter: names must be the modules' names in the file, .* got None, and the file has base_model\.model\.of"
    with pytest.raises(CheckpointError, match=said):
        load_adapter(tmp_path, params, cfg)
