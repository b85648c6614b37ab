"""The step of `bench step` in jax and optax: the same decoder, jitted whole, its parameters and state donated.

jax and optax are optional: without them the row is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain import rope_tables
from funcops.models.blocks import Sizes

AdamW = tuple[float, float, tuple[float, float], float]  # lr, the norm to clip to, betas, decay


def jax_step(
    sizes: Sizes, weights: dict[str, Tensor], x: Tensor, labels: Tensor, dtype: torch.dtype, adamw: AdamW
) -> Callable[[], Tensor] | None:
    """A step on the plain module's weights, by its names; each call does one more training step and returns the loss. None without
    jax or optax, and for tensors that are not on the CPU."""
    try:
        import jax
        import optax
    except ImportError as error:
        print(f"bench step: no jitted JAX step ({error})", file=sys.stderr)
        return None
    if not x.is_cpu:
        return None
    lr, clip, (b1, b2), decay = adamw
    optimiser = optax.chain(optax.clip_by_global_norm(clip), optax.adamw(lr, b1, b2, weight_decay=decay))
    params: Any = {name: jax.numpy.array(t.detach().numpy()) for name, t in weights.items()}
    state, narrow = optimiser.init(params), {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    tokens, targets = jax.numpy.array(x.numpy()), jax.numpy.array(labels.numpy())
    loss_of = _loss(jax, sizes, narrow, x.shape[1])

    def update(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(update, donate_argnums=(0, 1))

    def step() -> Tensor:
        nonlocal params, state
        params, state, loss = jitted(params, state)
        return torch.tensor(float(loss))  # float() waits for the result

    return step


def _loss(jax: Any, sizes: Sizes, dtype: str, length: int) -> Callable[..., Any]:
    """The mean cross entropy of `PlainLlama`, from float32 parameters, computed in `dtype`."""
    jnp, size = jax.numpy, sizes.dim // sizes.heads
    cos, sin = (jnp.array(t.float().numpy()).astype(dtype)[:, None] for t in rope_tables(length, size, 10000.0))

    def norm(x: Any, w: Any) -> Any:
        t = x.astype(jnp.float32)
        return (t * jax.lax.rsqrt((t * t).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * w

    def rope(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(p: Any, at: str, x: Any) -> Any:
        n = norm(x, p[f"{at}.norm.weight"])
        q, k, v = ((n @ p[f"{at}.{name}.weight"].T).reshape(*x.shape[:2], -1, size) for name in "qkv")
        return jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True).reshape(x.shape) @ p[f"{at}.out.weight"].T

    def mlp(p: Any, at: str, x: Any) -> Any:
        gate, up = jnp.split(norm(x, p[f"{at}.norm.weight"]) @ p[f"{at}.up.weight"].T, 2, -1)
        return (jax.nn.silu(gate) * up) @ p[f"{at}.down.weight"].T

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        p = {name: t.astype(dtype) for name, t in params.items()}
        x = p["embed.weight"][tokens]
        for i in range(sizes.layers):
            x = x + attention(p, f"blocks.{i}.attn", x)
            x = x + mlp(p, f"blocks.{i}.mlp", x)
        logits = (norm(x, p["norm.weight"]) @ p["head.weight"].T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    return loss
