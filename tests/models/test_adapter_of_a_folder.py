"""The config of a decoder with the adapters of a folder: PEFT trained them with drawn settings, and the logits are the same."""

import itertools
import json
import random as python_random

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import FAMILIES, tiny, transformers

from funcops import Needs, WithExtras, chain, random
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import at, put, replace, tree_map_tensors
from funcops.lora import (
    ParameterOf,
    RowsOf,
    adapter,
    load_adapter,
    lora_init,
    lora_needs,
    save_adapter,
    with_adapter,
    with_adapter_of,
    with_lora,
)
from funcops.models import decoder, decoder_x, from_hf, peft_names
from funcops.testing.tolerances import HF_LOGITS

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")
IDS = torch.arange(10).view(2, 5)
ATTENTION = r".*(attn|attention)\.\w*(proj|c_attn)\w*"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}

    def base(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            tiny(name).save_pretrained(made[name])
        return made[name]

    return base


def trained(folder, config, into):
    """The logits of PEFT's model with drawn adapters, which are saved."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(into)
    with torch.no_grad():
        return model(IDS).logits


def logits(params, cfg, model):
    y = chain.fwd(params, decoder_x(cfg, IDS, torch.float32), model, needs=Needs.NONE)[0]
    return y.main if type(y) is WithExtras else y


def read(folder, adapters):
    params, cfg = from_hf(folder)
    model = with_adapter_of(decoder(cfg), adapters, names=peft_names(cfg))
    given = lora_init(params, model, key=random.key(0))
    return load_adapter(adapters, given, model, names=peft_names(cfg, model)), cfg, model


def drawn(seed):
    draw = python_random.Random(seed)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    targets = draw.sample(modules, draw.randint(1, 4)) + draw.choice(([], ["gate_proj", "up_proj"]))
    one, other = draw.sample(modules, 2)
    return peft.LoraConfig(
        r=draw.randint(1, 4),
        lora_alpha=draw.choice((1, 3, 8)),
        target_modules=targets,
        rank_pattern=draw.choice(({}, {one: 5})),
        alpha_pattern=draw.choice(({}, {other: 7})),
        use_rslora=draw.random() < 0.5,
        lora_dropout=draw.choice((0.0, 0.1)),
        init_lora_weights=False,
    )


@pytest.mark.turns("seed", every=4)
@pytest.mark.parametrize("seed", range(16))
def test_logits_are_pefts(seed, bases, tmp_path):
    folder, config = bases("llama"), drawn(seed)
    want = trained(folder, config, tmp_path)
    params, cfg, model = read(folder, tmp_path)
    torch.testing.assert_close(logits(params, cfg, model), want, rtol=HF_LOGITS, atol=HF_LOGITS)
    save_adapter(tmp_path / "ours", params, model, names=peft_names(cfg, model))
    again, _, same = read(folder, tmp_path / "ours")
    assert same == model
    assert torch.equal(logits(again, cfg, model), logits(params, cfg, model))


ALL = [name if name in ("gpt2", "deepseek_v3") else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("name", ALL)
def test_all_linears_of_every_family_load_and_go_back(name, bases, tmp_path):
    """A module may be several linears of ours, and its rows may have another order. PEFT adapts routers and experts, too."""
    folder = bases(name)
    without = ["router"] if name.startswith("llama4") else None  # a linear whose forward returns a tuple, which PEFT does not take
    every = peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", exclude_modules=without, init_lora_weights=False)
    want = trained(folder, every, tmp_path / "theirs")
    params, cfg, model = read(folder, tmp_path / "theirs")
    torch.testing.assert_close(logits(params, cfg, model), want, rtol=1e-4, atol=1e-5)
    seeds = itertools.count()

    def away(t):
        return t + torch.rand(t.shape, generator=torch.Generator().manual_seed(next(seeds)))

    for way, change in (("same", lambda t: t), ("apart", away)):  # apart: q, k and v of one module have different a
        moved = with_adapter(params, tree_map_tensors(change, adapter(params, model)), model)
        save_adapter(tmp_path / way, moved, model, names=peft_names(cfg, model))
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            back = peft.PeftModel.from_pretrained(base, tmp_path / way).eval()(IDS).logits
        torch.testing.assert_close(back, logits(moved, cfg, model), rtol=1e-4, atol=1e-4)
        again, _, made = read(folder, tmp_path / way)
        torch.testing.assert_close(logits(again, cfg, made), back, rtol=1e-4, atol=1e-4)


def parameters(seed):
    """PEFT's settings for some parameters of experts and routers, of one rank and factor or of several."""
    draw = python_random.Random(seed)
    every = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", draw.choice(("mlp.gate.weight", "mlp.router.weight"))]
    targets = draw.sample(every, draw.randint(1, 3))
    return peft.LoraConfig(
        r=draw.randint(1, 4),
        lora_alpha=draw.choice((1, 3, 8)),
        target_modules=draw.choice(([], ["o_proj"])),
        target_parameters=targets,
        rank_pattern=draw.choice(({}, {targets[0]: 5})),
        alpha_pattern=draw.choice(({}, {targets[-1]: 7})),
        use_rslora=draw.random() < 0.5,
        init_lora_weights=False,
    )


@pytest.mark.turns("seed", every=8)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_parameters_of_experts_are_pefts(name, seed, bases, tmp_path):
    """Some of a module's parameters: PEFT nests them, the last outermost, and our file has its names."""
    folder, config = bases(name), parameters(seed)
    found = {path for path, _ in tiny(name).named_parameters()}
    config.target_parameters = [one for one in config.target_parameters if any(path.endswith(one) for path in found)]
    if not config.target_parameters:
        config.target_parameters = ["mlp.experts.down_proj"]
    want = trained(folder, config, tmp_path / "theirs")
    params, cfg, model = read(folder, tmp_path / "theirs")
    torch.testing.assert_close(logits(params, cfg, model), want, rtol=1e-4, atol=1e-5)
    save_adapter(tmp_path / "ours", params, model, names=peft_names(cfg, model))
    theirs, ours = (load_file(tmp_path / part / "adapter_model.safetensors") for part in ("theirs", "ours"))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        back = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()(IDS).logits
    torch.testing.assert_close(back, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_of_experts_adapters_are_pefts(name, bases, tmp_path):
    folder = bases(name)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    config.init_lora_weights = False
    trained(folder, config, tmp_path / "theirs")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "theirs", is_trainable=True)
    y = theirs(IDS).logits
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()
    want = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    params, cfg, model = read(folder, tmp_path / "theirs")
    out, kept = chain.fwd(params, decoder_x(cfg, IDS, torch.float32), model, needs=lora_needs(model))
    grads, _ = chain.bwd(kept, WithExtras(weights, dict.fromkeys(out.extras)), model)
    save_adapter(tmp_path / "grads", with_adapter(params, adapter(grads, model), model), model, names=peft_names(cfg, model))
    found = load_file(tmp_path / "grads" / "adapter_model.safetensors")
    assert found.keys() == want.keys()
    for path, grad in want.items():
        torch.testing.assert_close(found[path], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()), msg=path)


HEADS = [name if name in ("llama", "gemma3") else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]


@pytest.mark.turns("where", every=3)
@pytest.mark.parametrize("where", [("lm_head",), ("embed",), ("embed", "lm_head", "q_proj")], ids="-".join)
@pytest.mark.parametrize("name", HEADS)
def test_an_adapter_of_the_head_and_the_embedding_of_every_family(name, where, bases, tmp_path):
    """Tied or not. PEFT saves the base's weight beside it, which must be the one in params. An embedding has no dropout."""
    folder = bases(name)
    table = "wte" if name == "gpt2" else "embed_tokens"
    targets = [table if one == "embed" else one for one in where if one != "q_proj" or name != "gpt2"]
    settings = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=0.1, target_modules=targets, init_lora_weights=False)
    want = trained(folder, settings, tmp_path / "theirs")
    held = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert [one for one in held if one.endswith((".lora_embedding_A", ".base_layer.weight"))]
    params, cfg, model = read(folder, tmp_path / "theirs")
    torch.testing.assert_close(logits(params, cfg, model), want, rtol=1e-4, atol=1e-5)
    save_adapter(tmp_path / "ours", params, model, names=peft_names(cfg, model))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        back = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()(IDS).logits
    torch.testing.assert_close(back, want, rtol=1e-5, atol=1e-6)
    theirs, ours = held, load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert all(torch.equal(t, theirs[one]) for one, t in ours.items())
    saved = [one.split(".")[-3] for one in held if one.endswith(".base_layer.weight")]
    if not saved:  # PEFT does not know this module for an embedding
        return
    weight = "embed" if cfg.tied or "lm_head" not in where else "head"
    weight = f"{weight}.both.base" if weight == "head" or "embed" in where else weight
    other = put(params, weight, replace(at(params, weight), weight=at(params, weight).weight + 1.0))
    missing = put(params, weight, replace(at(params, weight), weight=None))
    for bad, said in ((other, "the weight in params .*, got another"), (missing, "left out .*, got None")):
        with pytest.raises(CheckpointError, match=f"load_adapter: .*({'|'.join(saved)}).base_layer.weight must be {said}"):
            load_adapter(tmp_path / "theirs", bad, model, names=peft_names(cfg, model))


BOTH = ["gate_proj", "up_proj"]
ALONE = {
    "gate": dict(target_modules=["gate_proj"]),
    "up": dict(target_modules=["q_proj", "up_proj"]),
    "by a pattern": dict(target_modules=r".*(q|gate)_proj"),
    "the other excluded": dict(target_modules=BOTH, exclude_modules=["gate_proj"]),
    "excluded by a pattern": dict(target_modules=BOTH, exclude_modules=r".*gate_proj"),
    "in some layers": dict(target_modules=r".*\.(0\.self_attn\.q|1\.mlp\.gate|0\.mlp\.up)_proj"),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_side_of_gate_and_up_alone(name, bases, tmp_path):
    """The other side's rows of b are zero; saved, both sides have the same a. A repeat has one rank in all layers."""
    folder = bases("llama")
    settings = peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **ALONE[name])
    want = trained(folder, settings, tmp_path / "theirs")
    if name == "in some layers":
        with pytest.raises(CheckpointError, match="with adapters of one rank and factor in all layers of a repeat"):
            read(folder, tmp_path / "theirs")
        return
    params, cfg, model = read(folder, tmp_path / "theirs")
    torch.testing.assert_close(logits(params, cfg, model), want, rtol=HF_LOGITS, atol=HF_LOGITS)
    save_adapter(tmp_path / "ours", params, model, names=peft_names(cfg, model))
    again, _, same = read(folder, tmp_path / "ours")
    assert same == model and torch.equal(logits(again, cfg, model), logits(params, cfg, model))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        back = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()(IDS).logits
    torch.testing.assert_close(back, want, rtol=1e-4, atol=1e-5)
    edited(tmp_path / "theirs", lambda t: t.pop(next(name for name in t if "_proj.lora_B" in name and "mlp" in name)))
    with pytest.raises(CheckpointError, match="(?s)load: .*missing: .*mlp"):
        load_adapter(tmp_path / "theirs", params, model, names=peft_names(cfg, model))


REFUSED = {
    "a linear's name": (
        {"*.experts.up": "m.*"},
        TypeError,
        r"names\['\*.experts.up'\] must be a ParameterOf, as blocks.0.mlp.experts.up is",
    ),
    "too few rows": ({"*.experts.up": ParameterOf("m.*", (1, 0))}, ValueError, r"at must be \d+ rows, got 2"),
    "one name": (
        {f"blocks.{i}.mlp.experts.up": ParameterOf("m") for i in range(2)},
        ValueError,
        "names must be a name for each adapter, got m for blocks.0.mlp.experts.up and for blocks.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_do_not_fit_experts_raise_before_anything_is_written(name, bases, tmp_path):
    names, kind, said = REFUSED[name]
    params, cfg = from_hf(bases("mixtral"))
    model = with_lora(decoder(cfg), 2, ("*.experts.up",))
    with pytest.raises(kind, match=f"save_adapter: {said}" if said[0] == "n" else said):
        save_adapter(tmp_path / "new", lora_init(params, model, key=random.key(0)), model, names=names)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", [["mlp.experts.nothing"], ["q_proj.weight"], "mlp.experts.down_proj", [1], [], None], ids=str)
@pytest.mark.parametrize("reader", ["with_adapter_of", "load_adapter"])
def test_a_target_that_is_no_parameter_of_ours_is_refused(reader, value, bases, tmp_path):
    folder = bases("mixtral")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"], init_lora_weights=False)
    trained(folder, config, tmp_path)
    params, cfg, model = read(folder, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": value}))
    said = "target_parameters must be " if value or reader == "load_adapter" else r"got others: model\.layers\.0\.mlp\.experts"
    with pytest.raises(CheckpointError, match=f"{reader}: .*{said}"):
        if reader == "load_adapter":
            load_adapter(tmp_path, params, model, names=peft_names(cfg, model))
        else:
            with_adapter_of(decoder(cfg), tmp_path, names=peft_names(cfg))


def edited(folder, change):
    path = folder / "adapter_model.safetensors"
    found = load_file(path)
    change(found)
    save_file(found, path)


LAYER = "base_model.model.model.layers.1"
UNSERVED = {
    "one side lost": (
        ["gate_proj", "up_proj"],
        lambda t: [t.pop(f"{LAYER}.mlp.up_proj.lora_{side}.weight") for side in "AB"],
        r"the adapters of .*gate_proj, .*up_proj must be of all modules of target_modules, .* got none of .*up_proj",
    ),
    "one layer without": (
        ["q_proj"],
        lambda t: [t.pop(f"{LAYER}.self_attn.q_proj.lora_{side}.weight") for side in "AB"],
        r"one rank and factor in all layers of a repeat, got several for blocks\.\*\.attn\.qkv\.q\.proj",
    ),
    "no module": (["lm_head"], lambda t: t.clear(), "got none"),
    "another model's": (
        ["q_proj"],
        lambda t: t.update({"base_model.model.other.lora_A.weight": torch.ones(1, 1)}),
        "got others: other",
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_raises(name, bases, tmp_path):
    targets, change, said = UNSERVED[name]
    trained(bases("llama"), peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), tmp_path)
    if change is not None:
        edited(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"with_adapter_of: .*{said}"):
        read(bases("llama"), tmp_path)


def test_a_linear_with_an_adapter_stays_as_it_is(bases, tmp_path):
    """The config of the rest takes the adapters of the folder."""
    trained(bases("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), tmp_path)
    _, cfg = from_hf(bases("llama"))
    once = with_lora(decoder(cfg), 3, ("*.mlp.down",))
    both = with_adapter_of(once, tmp_path, names=peft_names(cfg))
    assert both == with_lora(once, 2, ("*.q.proj",), alpha=8.0)


ROWS = {
    "too few": (RowsOf("m.*", 96, range(8)), r"at must be 32 rows, got 8"),
    "of all layers": (
        RowsOf("m", 96, range(32)),
        "names must be a name for each adapter, got m for blocks.0.attn.qkv.q.proj and for blocks.1",
    ),
    "in a tuple": ((RowsOf("m", 96, range(32)),), r"names\[.*\] must be (a )?str"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_fit_raise_before_anything_is_written(name, bases, tmp_path):
    rows, said = ROWS[name]
    names = {f"blocks.{i}.attn.qkv.q.proj": rows for i in range(2)} if name == "of all layers" else {"*.q.proj": rows}
    params, cfg = from_hf(bases("gpt2"))
    model = with_lora(decoder(cfg), 2, ("*.q.proj",))
    with pytest.raises((ValueError, TypeError), match=f"save_adapter: {said}" if said[0] == "n" else said):
        save_adapter(tmp_path / "new", lora_init(params, model, key=random.key(0)), model, names=names)
    assert not (tmp_path / "new").exists()


def test_linears_of_one_module_have_one_factor(bases, tmp_path):
    params, cfg = from_hf(bases("gpt2"))
    model = with_lora(with_lora(decoder(cfg), 2, ("*.q.proj",), alpha=2.0), 2, ("*.v.proj",), alpha=4.0)
    said = r"cfg must be one with the same factor for all linears of a module, got others at blocks.0.attn.qkv.v.proj, a part of"
    with pytest.raises(ValueError, match=said):
        save_adapter(tmp_path, lora_init(params, model, key=random.key(0)), model, names=peft_names(cfg, model))


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_rows_of_a_module_that_no_linear_takes_are_not_dropped(part, bases, tmp_path):
    """A file of q, k and v is not read as q's alone, unless the others' rows of b are zero, as in a file of q alone."""
    folder = bases("gpt2")
    trained(folder, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["c_attn"], init_lora_weights=False), tmp_path / "all")
    params, cfg = from_hf(folder)
    model = with_lora(decoder(cfg), 2, (f"*.{part}.proj",))
    given, names = lora_init(params, model, key=random.key(0)), peft_names(cfg, model)
    said = r"load_adapter: .*lora_B of \S*.h.0.attn.c_attn must be zero beyond the rows of linears with adapters .*, got others"
    with pytest.raises(CheckpointError, match=said):
        load_adapter(tmp_path / "all", given, model, names=names)
    save_adapter(tmp_path / "one", given, model, names=names)
    again = load_adapter(tmp_path / "one", lora_init(params, model, key=random.key(1)), model, names=names)
    assert torch.equal(logits(again, cfg, model), logits(given, cfg, model))


def test_linears_of_one_module_agree_on_its_rows(bases, tmp_path):
    params, cfg = from_hf(bases("gpt2"))
    model = with_lora(decoder(cfg), 2, ("*.q.proj", "*.v.proj"))
    parts = {"q": (96, range(32)), "v": (64, range(32, 64))}
    names = {f"blocks.{i}.attn.qkv.{part}.proj": RowsOf(f"m.{i}", *of) for i in range(2) for part, of in parts.items()}
    with pytest.raises(ValueError, match=r"save_adapter: names must be with one number of rows for m.0, got 96 and 64"):
        save_adapter(tmp_path / "new", lora_init(params, model, key=random.key(0)), model, names=names)


def test_modules_of_one_linear_have_one_factor(bases, tmp_path):
    """A factor of one of them alone has no place in the config."""
    settings = peft.LoraConfig(
        r=2, lora_alpha=2, alpha_pattern={"up_proj": 8}, target_modules=["gate_proj", "up_proj"], init_lora_weights=False
    )
    trained(bases("llama"), settings, tmp_path)
    said = r"with_adapter_of: .*the adapters of .*gate_proj, .*up_proj must be with one factor, .* got \[1\.0, 4\.0\]"
    with pytest.raises(CheckpointError, match=said):
        read(bases("llama"), tmp_path)
