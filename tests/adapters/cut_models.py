"""Models cut into stages, small ones and Hugging Face's; autograd's gradients of a mean over microbatches; and how far a pipeline's
are from them."""

import copy

import torch
from products import Products
from torch import nn

from funcops import stages_from_module
from funcops.schedule import dualpipe_v, one_f_one_b, zb_h1, zb_h2, zb_v

M = 8
FOUR = [one_f_one_b(4, M), zb_h1(4, M), zb_h2(4, M), zb_v(2, M), dualpipe_v(2, M)]  # of four stages


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, h, mask, bias):
        return h + self.mlp(self.norm(h)) * mask + bias


class Language(nn.Module):
    """Tied weights; labels, a mask and a value that is differentiated are read by all stages."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.bias = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False), nn.Linear(1, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        h, mask = self.embed(ids), (ids > 0).to(self.embed.weight.dtype).unsqueeze(-1)
        bias = self.bias(mask[:, :1])
        positions = torch.arange(ids.shape[1], dtype=h.dtype).unsqueeze(-1)
        h = h + positions
        for layer in self.layers:
            h = layer(h, mask, bias)
        return nn.functional.cross_entropy(self.head(h + positions).flatten(0, 1), labels.flatten())


HUGGING_FACE = {
    "Llama": ("Llama", "model.layers"),
    "GPT-2": ("GPT-2", "transformer.h"),
    "Qwen3-MoE": ("Qwen3-MoE", "model.layers"),
    "Qwen3-MoE, grouped": ("Qwen3-MoE", "model.layers"),
    "ViT": ("ViT", "vit.layers"),
}


def ids(seed, *shape, below=7):
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(seed))


def language():
    torch.manual_seed(0)
    xs = [{"ids": ids(m, 2, 5), "labels": ids(m + 100, 2, 5)} for m in range(M)]
    return Language().double(), xs, "layers", None


def hugging_face(name):
    """The model with four layers, microbatches, the path of its layers, and its loss."""
    import tiny_models

    kind, layers = HUGGING_FACE[name]
    sizes = {"n_layer": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if name == "GPT-2" else {"num_hidden_layers": 4}
    model = tiny_models.tiny(kind, **sizes)
    # grouped products have no float64, and Pipeline's examples of them have 16 bits alone
    model = model.bfloat16() if name.endswith("grouped") else model.double()
    model.config._experts_implementation = "grouped_mm" if name.endswith("grouped") else "batched_mm"
    if name == "ViT":
        xs = [{"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64), "labels": ids(m, 2, below=2)} for m in range(M)]
    else:
        xs = [
            {"input_ids": ids(m, 2, 12, below=256), "labels": ids(m + 100, 2, 12, below=256), "use_cache": False} for m in range(M)
        ]
    return model, xs, layers, lambda out: out.loss


def made(name):
    return language() if name == "Language" else hugging_face(name)


def cut(name, stages=4):
    """The model, microbatches, and its stages: one a layer, or two."""
    model, xs, layers, loss = made(name)
    cuts = [f"{layers}.{i}" for i in range(1, 4)]
    if stages == 8:
        cuts = [f"{layers}.0.mlp", *[path for one in cuts for path in (one, f"{one}.mlp")]]
    return model, xs, loss, stages_from_module(model, xs[0], cuts, output=loss)


def by_autograd(model, xs, loss):
    """Each microbatch's loss; the gradients of the mean by the parameter's name, several of a tied one in the order in which its
    modules are listed; and the products of it all."""
    apart, names = copy.deepcopy(model), {}
    first = {id(p): name for name, p in apart.named_parameters()}
    for path, part in apart.named_modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                own = f"{path}.{name}".lstrip(".")
                names.setdefault(first[id(p)], []).append(own)
                if first[id(p)] != own:
                    setattr(part, name, nn.Parameter(p.detach().clone()))
    losses = []
    with Products() as products:
        for x in xs:
            y = apart(**x) if loss is None else loss(apart(**x))
            (y / len(xs)).backward()
            losses.append(y.detach())
    grads = {name: p.grad for name, p in apart.named_parameters()}
    return losses, {name: [grads[one] for one in own] for name, own in names.items()}, products.count


def off(got, losses, want):
    """The largest distance of losses and gradients from autograd's. `want`: by name, the gradients in the stages' order."""
    found = [abs(a - b).max() for a, b in zip(got.ys or [], losses if got.ys else [], strict=True)]
    for index, own in sorted(got.dparams.items()):
        for name, dparam in own.items():
            # of a tied parameter the first stage has the first one's
            wanted = want[name][0 if index == "s0" else -1]
            found.append(abs(dparam - (0 if wanted is None else wanted)).max())
    return float(max(found))
