"""Tiny random models of each family: Hugging Face's logits, its gradients in float64, and the same checkpoint written back."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import FAMILIES, Wide, saved, tiny, transformers

from funcops import WithExtras, chain, trees
from funcops.models import decoder, decoder_x, from_hf, to_hf
from funcops.testing.tolerances import HF_GRADIENTS, HF_LOGITS

FIRST = ("llama", "gemma2", "deepseek_v3")  # of the first tier: between them they have nearly all that the others have
EACH = [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in FAMILIES]
IDS = torch.randint(1, 48, (2, 19), generator=torch.Generator().manual_seed(2))
DY = torch.randn(2, 19, 48, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def logits_of(y):
    return y.main if type(y) is WithExtras else y


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_hugging_faces(name, tmp_path):
    model = saved(name, tmp_path / "hf")
    params, cfg = from_hf(tmp_path / "hf", length=IDS.shape[1])
    y, _ = chain.fwd(params, decoder_x(cfg, IDS, torch.float32), decoder(cfg))
    want = model(IDS).logits
    assert want.abs().max() > 0.3
    torch.testing.assert_close(logits_of(y), want, atol=HF_LOGITS, rtol=0)


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_hugging_faces_in_float64(name, tmp_path):
    """Hugging Face's gradients are converted as weights are: written as a checkpoint, and read as params."""
    with Wide():
        model = tiny(name, torch.float64)
        model.save_pretrained(tmp_path / "weights")
        params, cfg = from_hf(tmp_path / "weights", length=IDS.shape[1])
        want = model(IDS).logits
        want.backward(DY)
    model_cfg = decoder(cfg)
    y, kept = chain.fwd(params, decoder_x(cfg, IDS, torch.float64), model_cfg)
    torch.testing.assert_close(logits_of(y), want.detach(), atol=HF_GRADIENTS, rtol=0)
    dy = WithExtras(DY, dict.fromkeys(y.extras)) if type(y) is WithExtras else DY
    dparams, _ = chain.bwd(kept, dy, model_cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs, _ = from_hf(tmp_path / "gradients")
    theirs = trees.paths(theirs)
    got = {path: t for path, t in trees.paths(dparams).items() if t is not None}
    assert {path for path, t in theirs.items() if t is not None and not path.endswith("route.bias")} == set(got)
    for path, t in got.items():
        none = name == "gpt2" and path.endswith("k.proj.bias")  # what is the same for all keys changes no softmax
        assert none or t.abs().max() > 1e-6, path
        torch.testing.assert_close(t, theirs[path], atol=HF_GRADIENTS, rtol=0, msg=lambda said, path=path: f"{path}: {said}")


@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_comes_back_bit_for_bit(name, tmp_path):
    saved(name, tmp_path / "hf", torch.bfloat16)
    params, cfg = from_hf(tmp_path / "hf")
    to_hf(params, cfg, tmp_path / "ours", shard_bytes=9000)
    written = {}
    for file in sorted((tmp_path / "ours").glob("*.safetensors")):
        written |= load_file(file)
    given = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(written) == set(given) and all(torch.equal(written[key], given[key]) for key in given)
    again, same = from_hf(tmp_path / "ours")
    assert same == cfg
    for path, t in trees.paths(params).items():
        back = trees.at(again, path)
        assert (t is None and back is None) or (t.dtype is back.dtype and torch.equal(t, back)), path


@pytest.mark.parametrize("name", EACH)
def test_hugging_face_reads_written_files(name, tmp_path):
    model = saved(name, tmp_path / "hf")
    params, cfg = from_hf(tmp_path / "hf")
    to_hf(params, cfg, tmp_path / "ours", fields={"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0})
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(again) is type(model)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    # Not the same bits: on some CPUs a product's depend on where a file put the weights.
    torch.testing.assert_close(again.eval()(IDS).logits, model(IDS).logits, atol=HF_LOGITS, rtol=0)


@pytest.mark.parametrize("rows", [2, 6, 10])
def test_rows_that_alternate_are_sorted_and_those_that_turn_come_first(rows):
    """One family's gates alternate with their up rows; another's heads end with the rows that rotate."""
    from types import SimpleNamespace

    import torch

    from funcops.models.hf import StoredLeaf

    def order(kind, cfg=None):
        found = StoredLeaf(SimpleNamespace(order=kind, stacked=False), ("w",), ("w",), (2 * rows, 3), (2 * rows, 3), 0).order(cfg)
        return None if found is None else found.tolist()

    assert order("evens_first") == [*range(0, 2 * rows, 2), *range(1, 2 * rows, 2)] and order("") is None
    cfg = SimpleNamespace(heads=2, latent=SimpleNamespace(rope_size=1))
    assert order("turning_first", cfg) == [rows - 1, *range(rows - 1), 2 * rows - 1, *range(rows, 2 * rows - 1)]
    assert torch.arange(2 * rows)[order("turning_first", cfg)].tolist() == order("turning_first", cfg)
