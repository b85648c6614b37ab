"""Mixed precision as frameworks use it: a swapped tiny Llama trains like the original."""

import copy

import pytest
import torch

from funcops import nn as fnn

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
STEPS, SIZES = 8, dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SIZES))


def rows():
    """Sequences that count upwards, which are learned quickly."""
    start = torch.arange(4 * STEPS) * 7 % 32
    return [{"input_ids": row, "labels": row} for row in (start[:, None] + torch.arange(16)) % 32]


def stacked(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def by_trainer(model, mixed, folder):
    losses = []

    class Loss(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    options = dict(max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, report_to=[])
    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, bf16=mixed, learning_rate=1e-2, save_strategy="no", disable_tqdm=True, seed=0, **options
    )
    transformers.Trainer(model, args, train_dataset=rows(), data_collator=stacked, callbacks=[Loss()]).train()
    return losses


def by_accelerate(model, mixed, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # it is one of a process, whoever made it
    runner, losses = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if mixed else "no"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=4, collate_fn=stacked)
    model, optimizer, loader = runner.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerate.state.AcceleratorState._reset_state(True)
    return losses


def by_lightning(model, mixed, folder):
    lightning = pytest.importorskip("lightning")
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, i):
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if mixed else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=4, collate_fn=stacked))
    return losses


@pytest.mark.parametrize("run", [by_trainer, by_accelerate, by_lightning], ids=lambda run: run.__name__)
def test_mixed_precision_trains(run, tmp_path):
    """Losses are as near to the float32 run's as torch's own bfloat16 run's (the largest distance over the steps, at least 2^-8 of
    the first loss, one rounding to bfloat16), and nearer than training lowers the loss."""
    found = {}
    for swapped in (False, True):
        for mixed in (False, True):
            model = llama()
            if swapped:
                fnn.from_torch(model, policy="minimal" if run is by_accelerate else None)
            found[swapped, mixed] = torch.tensor(run(model, mixed, tmp_path))
            assert all(p.dtype is torch.float32 for p in model.parameters())
    exact = found[False, False]
    assert len(exact) == STEPS and exact[0] - exact[-1] > 0.5
    torch.testing.assert_close(found[True, False], exact, rtol=1e-3, atol=1e-3)
    room = max((found[False, True] - exact).abs().max(), 2**-8 * exact[0])
    assert (found[True, True] - exact).abs().max() <= room, found
    assert not torch.equal(found[True, True], found[True, False]), "it did run in bfloat16"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("run", [by_trainer, by_accelerate, by_lightning], ids=lambda run: run.__name__)
def test_a_whole_model_has_the_same_losses(run, mixed, tmp_path):
    want = run(llama(), mixed, tmp_path)
    model = llama()
    fnn.from_torch(model, example=stacked(rows()[:2]))
    assert run(model, mixed, tmp_path) == want and len(want) == STEPS
    assert model._whole.traces.tries == 2, "of the example, and of the batches"


def test_a_whole_model_behind_accelerate_is_undone():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    runner, model, batch = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), llama(), stacked(rows()[:2])
    fnn.from_torch(model, example=batch)
    prepared = runner.prepare(model)
    assert fnn.to_torch(model).left[0].after == "its forward was wrapped or replaced since"
    assert (
        type(copy.deepcopy(runner.unwrap_model(prepared, keep_fp32_wrapper=False))(**batch).loss.grad_fn).__name__
        == "_NodeBackward"
    )
    assert fnn.to_torch(model).replaced and "forward" not in vars(model)
    assert type(model(**batch).loss.grad_fn).__name__ != "_NodeBackward"
    prepared = runner.prepare(llama())
    with pytest.raises(
        ValueError, match="from_torch: model must be a module without a forward of its own, with example .call from_torch before"
    ):
        fnn.from_torch(prepared, example=batch)
    accelerate.state.AcceleratorState._reset_state(True)


def test_a_copy_made_in_training_trains_on():
    """A swapped model is copied and saved with the state that mixed precision left in it."""
    model, batch = llama(), stacked(rows()[:4])
    fnn.from_torch(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
        other = copy.deepcopy(model)
        want = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(**batch).loss, want)
