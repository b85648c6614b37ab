"""Doors into other people's trainers, as docs/existing-models-in-depth.md shows them.

Tried with transformers 5.23.0, trl 1.16.0, accelerate 1.15.0, lightning 2.6.6, kernels 0.17.2 and torchtitan 0.3.0. This
transformers takes kernels from 0.18.2 on, which no index offered, so a norm gets its name here, and `use_kernels=True` itself was
not tried. Only transformers, accelerate and lightning are dependencies of the tests: `pip install --no-deps --target` puts others
into a folder of PYTHONPATH, and for torchtitan spmd_types 0.2.3, tyro, typeguard, docstring-parser, shtab, torchdata,
torch_checkpointing and tensorboard.
"""

import functools
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from test_frameworks import SIZES, STEPS, by_trainer, llama, rows, stacked

from funcops import nn as fnn

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "existing-models-in-depth.md"
NODE = "_NodeBackward"


def shown(word, monkeypatch, name):
    """The page's program with this word, as a module."""
    (block,) = [one for one in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.S | re.M) if word in one]
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), module.__dict__)
    return module


def options(folder, **more):
    said = dict(max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, learning_rate=1e-2)
    return dict(output_dir=folder, save_strategy="no", disable_tqdm=True, seed=0, bf16=False, **said) | more


def losses_of(trainer):
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize("made", ["given", "by model_init"])
@pytest.mark.parametrize("policy", [None, "minimal"])
def test_a_callback_swaps_the_trainers_model(made, policy, tmp_path):
    """Losses are the untouched model's, and the optimiser trains the parameters that the model had."""
    want = by_trainer(llama(), False, tmp_path)
    swap = functools.partial(fnn.from_torch, policy=policy, trace=False)
    callback, model = fnn.trainer_callback(swap), llama()
    args = transformers.TrainingArguments(**options(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2))
    given = dict(model=model) if made == "given" else dict(model_init=llama)
    trainer = transformers.Trainer(args=args, train_dataset=rows(), data_collator=stacked, callbacks=[callback], **given)
    before = dict(trainer.model.named_parameters())
    found = losses_of(trainer)
    assert len(found) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-3, atol=1e-3)
    assert callback.replaced.replaced and callback.swapped is trainer.model
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    now = dict(trainer.model.named_parameters())
    assert held == {id(p) for p in now.values()}
    assert made == "by model_init" or all(now[n] is p is dict(model.named_parameters())[n] for n, p in before.items())
    assert type(trainer.model.model.norm(torch.ones(2, SIZES["hidden_size"])).grad_fn).__name__ == NODE


def test_checkpoints_leave_a_hook_on_the_embeddings():
    """Until it is taken away, the model runs part by part, which keeps more than its graph."""
    model, batch = llama(), stacked(rows()[:2])
    fnn.from_torch(model)

    def kept():
        for _ in range(3):
            model(**batch).loss.backward()
        return fnn.kept_bytes(model, **batch)

    before = kept()
    model.gradient_checkpointing_enable()
    assert kept() < before
    model.gradient_checkpointing_disable()
    assert kept() > before
    model.disable_input_require_grads()
    assert kept() == before


def test_a_callback_of_a_whole_model_keeps_the_bits(tmp_path):
    """In bfloat16 as well, as the swap comes before accelerate wraps the forward."""
    found = []
    for callbacks in ([], [fnn.trainer_callback()]):
        args = transformers.TrainingArguments(**options(tmp_path, bf16=True))
        trainer = transformers.Trainer(llama(), args, train_dataset=rows(), data_collator=stacked, callbacks=callbacks)
        found.append(losses_of(trainer))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=2**-7, atol=2**-7)
    assert any([change.after == "its joint graph" for change in callbacks[0].replaced.replaced])
    assert trainer.model._whole.traces.tries


def test_a_callback_of_trl(tmp_path):
    trl = pytest.importorskip("trl", exc_type=ImportError)
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    found = []
    for callbacks in ([], [fnn.trainer_callback()]):
        data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
        args = trl.SFTConfig(
            **options(tmp_path, packing=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True})
        )
        trainer = trl.SFTTrainer(llama(), args, train_dataset=data, callbacks=callbacks, processing_class=tokenizer())
        found.append(losses_of(trainer))
    assert len(found[0]) == STEPS and found[0][0] - found[0][-1] > 0.3
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-3, atol=1e-3)
    assert callbacks[0].replaced.replaced


def tokenizer():
    """A tokenizer of 32 words, for a trainer that asks for one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, SIZES["vocab_size"])}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="w1")


def test_an_override_of_torchtitan(monkeypatch):
    """An MLP of its own config tree has the gradients of torchtitan's MLP and keeps fewer bytes."""
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    ours = shown("torchtitan", monkeypatch, "my_overrides")
    models = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    found = []
    try:
        for imports in ([], ["my_overrides.feed_forward"]):
            tree = models.model_registry("debugmodel").model
            said = config.apply_overrides(config.OverrideConfig(imports=imports), tree)
            assert len(said) == len(imports) * len(tree.layers)
            torch.manual_seed(0)
            mlp = tree.layers[0].feed_forward.build()
            mlp.init_states()
            assert (type(mlp) is ours.SwappedFeedForward) == bool(imports)
            torch.manual_seed(1)
            x = torch.randn(64, 256, requires_grad=True)
            y = mlp(x)
            found.append((fnn.kept_bytes(mlp, x), y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])))
    finally:
        config.clear_overrides()
    (theirs, *want), (kept, *got) = found
    assert kept < theirs and all(map(torch.equal, got, want))
    assert type(y.grad_fn).__name__ == NODE


def test_a_mapping_of_kernels(monkeypatch):
    kernels = pytest.importorskip("kernels", exc_type=ImportError)
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    if getattr(norm, "kernel_layer_name", None) is None:
        monkeypatch.setattr(norm, "kernel_layer_name", "RMSNorm", raising=False)
    shown("kernels", monkeypatch, "my_kernels")
    model, untouched, batch = llama(), llama(), stacked(rows()[:2])
    held = dict(model.named_parameters())
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    loss, want = model(**batch).loss, untouched(**batch).loss
    torch.testing.assert_close(loss, want)
    for parameter, other in zip(model.parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(
            *[torch.autograd.grad(y, p, retain_graph=True)[0] for y, p in ((loss, parameter), (want, other))]
        )
    assert all(p is held[n] for n, p in model.named_parameters())
    assert all("forward" not in vars(part) for part in model.modules() if isinstance(part, norm))
    assert type(model.model.norm(torch.ones(2, SIZES["hidden_size"])).grad_fn).__name__ == NODE
    assert fnn.kept_bytes(model, **batch) < fnn.kept_bytes(untouched, **batch)
    kernels.kernelize(model.eval(), mode=kernels.Mode.INFERENCE, device="cpu")  # as transformers does for each change of the mode
    torch.testing.assert_close(model(**batch).loss, untouched.eval()(**batch).loss)
