"""Chains in which a fusion rule fires, or nearly does."""

from funcops import (
    ActivationConfig,
    AddConfig,
    BiasConfig,
    ChainConfig,
    DropoutConfig,
    ForkConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    ParallelConfig,
    RMSNormConfig,
    ScaleConfig,
    Step,
    activation,
    add,
    bias,
    dropout,
    fork,
    glu,
    layer_norm,
    linear,
    parallel,
    rms_norm,
    scale,
)

D = 6


MAKERS = {
    "linear": lambda n: Step(n, linear, LinearConfig(D, D, bias=False)),
    "linear_b": lambda n: Step(n, linear, LinearConfig(D, D)),
    "bias": lambda n: Step(n, bias, BiasConfig(D)),
    "scale": lambda n: Step(n, scale, ScaleConfig(0.5)),
    "gelu": lambda n: Step(n, activation, ActivationConfig("gelu_tanh")),
    "silu": lambda n: Step(n, activation, ActivationConfig("silu")),
    "rms": lambda n: Step(n, rms_norm, RMSNormConfig(D)),
    "ln": lambda n: Step(n, layer_norm, LayerNormConfig(D)),
    "ln_plain": lambda n: Step(n, layer_norm, LayerNormConfig(D, bias=False)),
    "glu": lambda n: Step(n, glu, GLUConfig(kind="swiglu", gate="first")),
    "glu_clamped": lambda n: Step(n, glu, GLUConfig(kind="clamped_swiglu", gate="first")),
    "wide": lambda n: Step(n, linear, LinearConfig(D, 2 * D, bias=False)),
    "drop": lambda n: Step(n, dropout, DropoutConfig(0.4), takes=("key",)),
    "drop_0": lambda n: Step(n, dropout, DropoutConfig(0.0), takes=("key",)),
    "drop_off": lambda n: Step(n, dropout, DropoutConfig(0.4, train=False), takes=("key",)),
    "add": lambda n: Step(n, add, AddConfig(), takes=("given",)),
    "fork": lambda n: Step(n, fork, ForkConfig(), gives=(f"{n}_out",)),
}
PAIRED = MAKERS | {  # whose x or y is a pair
    "twin": lambda n: Step(n, parallel, ParallelConfig(branches=(MAKERS["linear"]("gate"), MAKERS["linear"]("up")))),
    "paired": lambda n: Step(n, glu, GLUConfig(kind="swiglu", paired=True)),
}


def made(words, makers=MAKERS, **options):
    """A chain of the steps that `words` name; the last step adds the output that a fork gives."""
    steps = [makers[word](f"{word}_{i}") for i, word in enumerate(words.split())]
    given_names = [name for step in steps for name in step.gives]
    steps += [Step(f"end_{i}", add, AddConfig(), takes=(name,)) for i, name in enumerate(given_names)]
    taken = {name for step in steps for name in step.takes}
    return ChainConfig(steps=tuple(steps), extras=tuple(n for n in ("given", "key") if n in taken), **options)
