"""The decoder of `lm.model` cut into stages: a chain whose steps are the stages, and its params."""

from __future__ import annotations

from typing import Any

from funcops import ChainConfig, RepeatConfig, Step, chain, repeat, with_policy
from funcops.low_precision import Recipe, with_recipe
from funcops.models import DecoderConfig
from lm.model import left_out, model


def layers_of(cfg: DecoderConfig, stages: int) -> list[range]:
    """The layers of each stage, as evenly as possible."""
    if not 2 <= stages <= cfg.layers:
        raise ValueError(f"--stages: expected 2 to {cfg.layers}, as there are --layers {cfg.layers}, got {stages}")
    ends = [round(i * cfg.layers / stages) for i in range(stages + 1)]
    return [range(first, last) for first, last in zip(ends, ends[1:], strict=False)]


def staged(cfg: DecoderConfig, stages: int, recipe: Recipe | None = None, policy: str | None = None) -> ChainConfig:
    """`model(cfg, recipe)` in stages: bytes, rotary table and labels to the mean loss. `policy`: the policy of each block."""
    whole, layer = model(cfg), chain if policy is None else with_policy(chain, policy)
    embed, blocks, norm, head, loss = whole.steps
    steps = []
    for i, layers in enumerate(layers_of(cfg, stages)):
        inner = [Step("blocks", repeat, RepeatConfig(layer, blocks.cfg.cfg, len(layers)))]
        inner = [embed, *inner] if i == 0 else inner
        last = i == stages - 1
        inner = [*inner, norm, head, loss] if last else inner
        extras = ("rotation", "labels") if last else ("rotation",)
        stage = ChainConfig(steps=tuple(inner), extras=extras, joined=whole.joined if last else ())
        steps.append(Step(f"stage{i}", chain, stage))
    tied = {f"stage{stages - 1}.{path}": f"stage0.{source}" for path, source in whole.ties}
    made = ChainConfig(steps=tuple(steps), extras=("rotation", "labels"), ties=tied)
    return made if recipe is None else with_recipe(made, recipe, only=("*.blocks.*",), skip=left_out(recipe, cfg))


def split(params: dict[str, Any], cfg: DecoderConfig, stages: int) -> dict[str, Any]:
    """The params of `model(cfg)` by stage: the same tensors."""
    found: dict[str, Any] = {
        f"stage{i}": {"blocks": tuple(params["blocks"][layer] for layer in layers)}
        for i, layers in enumerate(layers_of(cfg, stages))
    }
    found["stage0"] = {"embed": params["embed"], **found["stage0"]}
    found[f"stage{stages - 1}"].update({name: params[name] for name in ("norm", "head", "loss")})
    return found


def joined(stages: dict[str, Any]) -> dict[str, Any]:
    """The params of the whole model, from the stages that `split` made."""
    trees = list(stages.values())
    whole = {name: tree for stage in trees for name, tree in stage.items()}
    return {**whole, "blocks": tuple(layer for stage in trees for layer in stage["blocks"])}
