"""Any change of a layer in a swapped module has the effect that it has in torch's."""

import copy
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from tiers import drawn
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

from funcops import nn as fnn

D = 6


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def decoder_mlp(family):
    def make():
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        sizes = dict(hidden_size=D, intermediate_size=8, mlp_bias=True, hidden_act="silu")
        return getattr(modeling, f"{family.capitalize()}MLP")(SimpleNamespace(**sizes))

    return make


def gpt2_mlp():
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    return modeling.GPT2MLP(8, SimpleNamespace(hidden_size=D, activation_function="gelu_new", resid_pdrop=0.0))


def mlp_of(family, name, **sizes):
    def make():
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        return getattr(modeling, name)(
            SimpleNamespace(hidden_size=D, intermediate_size=8, d_model=D, d_ff=8, dropout_rate=0.0, **sizes)
        )

    return make


def conv1d():
    return Holder(pytest.importorskip("transformers.pytorch_utils").Conv1D(D, D))


MODELS = {  # how it is made, a linear layer of it, its activation
    "llama": (decoder_mlp("llama"), "up_proj", "act_fn"),
    "qwen2": (decoder_mlp("qwen2"), "down_proj", "act_fn"),
    "gpt2": (gpt2_mlp, "c_fc", "act"),
    "sequential": (lambda: nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, D)), "2", "1"),
    "linear": (lambda: Holder(nn.Linear(D, D)), "inner", None),
}
OTHERS = {
    "phi3": (mlp_of("phi3", "Phi3MLP", hidden_act="silu"), "gate_up_proj", "activation_fn"),
    "gemma3": (mlp_of("gemma3", "Gemma3MLP", hidden_activation="gelu_pytorch_tanh"), "gate_proj", "act_fn"),
    "vit": (mlp_of("vit", "ViTMLP", hidden_act="gelu"), "fc2", "activation_fn"),
    "t5": (mlp_of("t5", "T5DenseActDense", dense_act_fn="relu"), "wi", "act"),
    "t5 gated": (mlp_of("t5", "T5DenseGatedActDense", dense_act_fn="gelu_new"), "wi_1", "act"),
    "bert": (mlp_of("bert", "BertIntermediate", hidden_act="gelu"), "dense", "intermediate_act_fn"),
    "conv1d": (conv1d, "inner", None),
}


def adapter(kind, **options):
    def tamper(module, name, act):
        peft = pytest.importorskip("peft")
        conv1d = type(getattr(module, name)).__name__ == "Conv1D"
        if kind == "ia3":
            config = peft.IA3Config(target_modules=[name], feedforward_modules=[], fan_in_fan_out=conv1d, init_ia3_weights=False)
        else:
            config = peft.LoraConfig(target_modules=[name], r=2, init_lora_weights=False, fan_in_fan_out=conv1d, **options)
        peft.inject_adapter_in_model(config, module)
        for p in module.parameters():
            p.requires_grad_()
            p.data = p.data.double()

    return tamper


def hook(register, change, on_act=False):
    return lambda module, name, act: [getattr(getattr(module, act if on_act else name), register)(change)]


def globally(register, change):
    def for_leaves(m, *given):
        return change(m, *given) if isinstance(m, (nn.Linear, nn.SiLU)) else None

    return lambda module, name, act: [getattr(nn.modules.module, register)(for_leaves)]


def twice_out(m, x, y):
    return 2 * y


def twice_in(m, x):
    return (2 * x[0],)


def twice_grads(m, found, dy):
    return tuple(None if g is None else 2 * g for g in found)


def twice_dy(m, dy):
    return tuple(2 * g for g in dy)


def own_forward(module, name, act):
    layer = getattr(module, name)
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)


def subclass(module, name, act):
    layer = getattr(module, name)
    layer.__class__ = type("Twice", (type(layer),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)})


def other_weights(module, name, act):
    layer = copy.deepcopy(getattr(module, name))
    for p in layer.parameters():
        nn.init.normal_(p)
    setattr(module, name, layer)


def wrapped(module, name, act):
    setattr(module, name, nn.Sequential(getattr(module, name), nn.Tanh()))


def to(activation):
    return lambda module, name, act: setattr(module, act, activation())


def patched(find):
    """A program replaces the forward of a class, for all its modules."""

    def tamper(module, name, act):
        one = find(module, name, act)
        cls = next(c for c in type(one).__mro__ if "forward" in vars(c) and not c.__module__.startswith("funcops"))
        before = cls.forward
        cls.forward = lambda self, x: 2 * before(self, x)
        return [SimpleNamespace(remove=lambda: setattr(cls, "forward", before))]

    return tamper


def registered_bias(module, name, act):
    layer = getattr(module, name)
    size = layer.weight.shape[0 if isinstance(layer, nn.Linear) else 1]
    layer.register_parameter("bias", nn.Parameter(torch.randn(size, dtype=torch.float64)))


def deleted_bias(module, name, act):
    layer = getattr(module, name)
    del layer.bias
    layer.register_parameter("bias", None)


def deleted_bias_and_another(module, name, act):
    deleted_bias(module, name, act)
    module(torch.ones(1, D, dtype=torch.float64))
    registered_bias(module, name, act)


def without_bias(module, name, act):
    getattr(module, name).bias = None


def other_parameter(module, name, act):
    layer = getattr(module, name)
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def pruned(module, name, act):
    prune.random_unstructured(getattr(module, name), "weight", 0.5)


def by(change):
    def tamper(module, name, act):
        change(getattr(module, name))

    return tamper


def old_weight_norm(module, name, act):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(getattr(module, name))


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


class Quantised(nn.Module):
    """A layer like a quantised one: int8 weights and a scale."""

    def __init__(self, layer):
        super().__init__()
        w = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        self.register_buffer("weight", (w * 32).to(torch.int8))
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.double() / 32, self.bias)


class Tagged(torch.Tensor):
    """A tensor subclass."""


def tagged_weight(module, name, act):
    layer = getattr(module, name)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))


class Twice(torch.Tensor):
    """A weight with which a linear layer returns twice its result."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in (nn.functional.linear, torch.addmm):
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * func(*args, **(kwargs or {}))


def swapped_in_place(module, name, act):
    weight = getattr(module, name).weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().neg().as_subclass(Twice)))


def other_data(module, name, act):
    weight = getattr(module, name).weight
    weight.data = 2 * weight.data


def other_dict_of_hooks(module, name, act):
    getattr(module, name)._forward_hooks = OrderedDict({0: twice_out})


def accelerates_hook(module, name, act):
    hooks = pytest.importorskip("accelerate.hooks")

    class Twice(hooks.ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    hooks.add_hook_to_module(getattr(module, name), Twice())


def offloaded(module, name, act):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(getattr(module, name), execution_device="cpu")


def sharded(module, name, act):
    from torch.distributed.fsdp import fully_shard

    fully_shard(getattr(module, name), mesh=torch.distributed.init_device_mesh("cpu", (1,)))


TAMPERINGS = {
    "nothing": lambda *_: None,
    "LoRA": adapter("lora"),
    "DoRA": adapter("lora", use_dora=True),
    "IA3": adapter("ia3"),
    "forward hook": hook("register_forward_hook", twice_out),
    "forward pre-hook": hook("register_forward_pre_hook", twice_in),
    "backward hook": hook("register_backward_hook", twice_grads),
    "full backward hook": hook("register_full_backward_hook", twice_grads),
    "full backward pre-hook": hook("register_full_backward_pre_hook", twice_dy),
    "hook of the activation": hook("register_forward_hook", twice_out, on_act=True),
    "global forward hook": globally("register_module_forward_hook", twice_out),
    "global forward pre-hook": globally("register_module_forward_pre_hook", twice_in),
    "global backward hook": globally("register_module_full_backward_hook", twice_grads),
    "global backward pre-hook": globally("register_module_full_backward_pre_hook", twice_dy),
    "own forward": own_forward,
    "subclass": subclass,
    "other weights": other_weights,
    "wrapped": wrapped,
    "unknown activation": to(nn.Tanh),
    "known activation": to(nn.GELU),
    "activation with an option": to(lambda: nn.GELU(approximate="tanh")),
    "without bias": without_bias,
    "another bias, registered": registered_bias,
    "bias deleted": deleted_bias,
    "bias deleted, another registered": deleted_bias_and_another,
    "class of the layer patched": patched(lambda module, name, act: getattr(module, name)),
    "class of the activation patched": patched(lambda module, name, act: getattr(module, act)),
    "class of the module patched": patched(lambda module, name, act: module),
    "other parameter": other_parameter,
    "prune": pruned,
    "weight_norm of old": old_weight_norm,
    "weight_norm": by(parametrizations.weight_norm),
    "spectral_norm": by(parametrizations.spectral_norm),
    "parametrize": by(lambda layer: parametrize.register_parametrization(layer, "weight", Doubled())),
    "quantised": lambda module, name, act: setattr(module, name, Quantised(getattr(module, name))),
    "tensor of a class of its own": tagged_weight,
    "swapped in place": swapped_in_place,
    "other data": other_data,
    "frozen": by(lambda layer: layer.weight.requires_grad_(False)),
    "another dict of hooks": other_dict_of_hooks,
    "accelerate's hook": accelerates_hook,
    "cpu offload": offloaded,
    "fully_shard": sharded,
}
WITHOUT_BIAS = ("without bias", "bias deleted", "bias deleted, another registered")
OF_ACT = tuple(name for name in TAMPERINGS if "activation" in name)


@pytest.fixture(scope="module")
def process_group():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def outcome(module, name, act, tamper, when):
    """y and all gradients of a module, changed before or after the swap, or never swapped."""
    x = torch.linspace(-1, 1, 3 * D, dtype=torch.float64).view(3, D).requires_grad_()
    if when in ("after the swap", "after a call"):
        fnn.from_torch(module)
    if when == "after a call":
        module(x).sum().backward()
        module.zero_grad()
        x.grad = None
    torch.manual_seed(1)
    handles = tamper(module, name, act) or []
    if when == "before the swap":
        fnn.from_torch(module)
    try:
        y = module(x)
        y.square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = {n: plain(p.grad) for n, p in module.named_parameters()}
    return plain(y.detach()), plain(x.grad), gradients


def plain(t):
    if t is None:
        return torch.zeros(())
    return t.full_tensor() if hasattr(t, "full_tensor") else t.as_subclass(torch.Tensor)


GRID = [pytest.param(tampering, kind, id=f"{tampering}-{kind}") for tampering in TAMPERINGS for kind in MODELS]


@pytest.mark.turns("tampering", "kind", every=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tampering", "kind"), [*GRID, *drawn(TAMPERINGS, OTHERS)])
def test_tampering(tampering, kind, request):
    make, name, act = {**MODELS, **OTHERS}[kind]
    if (act is None and tampering in OF_ACT) or (kind in ("gpt2", "conv1d") and tampering in WITHOUT_BIAS):
        pytest.skip("torch has none")
    if tampering == "fully_shard":
        request.getfixturevalue("process_group")
    torch.manual_seed(0)
    module = make().double()
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    want = outcome(copy.deepcopy(module), name, act, TAMPERINGS[tampering], None)
    for when in ("before the swap", "after the swap", "after a call"):
        got = outcome(copy.deepcopy(module), name, act, TAMPERINGS[tampering], when)
        assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text, when=when: f"{when}: {text}")
