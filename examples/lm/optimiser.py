"""The optimiser of a run: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from funcops.optim import (
    AdamWConfig,
    MuonConfig,
    adamw_init,
    adamw_update,
    combine,
    decay_mask,
    matrix_mask,
    muon_init,
    muon_update,
    partition,
    quantize_state,
    with_quantized_state,
)


class Optimiser(NamedTuple):
    """`decay` and `matrices` are trees of bools like params: which leaves are decayed, and which ones Muon updates. `eight_bit`:
    whether the state is in 8 bits."""

    adamw: AdamWConfig
    decay: Any
    muon: MuonConfig | None = None
    matrices: Any = None
    eight_bit: bool = False


def optimiser_of(args: Any, params: Any) -> Optimiser:
    adamw = AdamWConfig(lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    decay = decay_mask(params, ("*norm.weight",))
    if args.optimizer == "adamw":
        return Optimiser(adamw, decay, eight_bit=args.eight_bit_state)
    muon = MuonConfig(lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")  # AdamW's rates suit it
    return Optimiser(adamw, decay, muon, matrix_mask(params), args.eight_bit_state)


def first_state(params: Any, o: Optimiser) -> Any:
    """The state of AdamW; with Muon both states, by name."""
    kept = quantize_state if o.eight_bit else lambda state: state
    if o.muon is None:
        return kept(adamw_init(params, o.adamw))
    matrices, rest = partition(params, o.matrices)
    return {"adamw": kept(adamw_init(rest, o.adamw)), "muon": kept(muon_init(matrices, o.muon))}


def update(params: Any, grads: Any, state: Any, o: Optimiser, *, lr: float | Tensor, in_place: bool) -> tuple[Any, Any]:
    """A step at the rate `lr`."""
    of_adamw, of_muon = (with_quantized_state(one) if o.eight_bit else one for one in (adamw_update, muon_update))
    if o.muon is None:
        return of_adamw(params, grads, state, o.adamw, lr=lr, decay=o.decay, in_place=in_place)
    (matrices, rest), (of_matrices, others), (decay, decays) = (partition(tree, o.matrices) for tree in (params, grads, o.decay))
    matrices, muon = of_muon(matrices, of_matrices, state["muon"], o.muon, lr=lr, decay=decay, in_place=in_place)
    rest, adamw = of_adamw(rest, others, state["adamw"], o.adamw, lr=lr, decay=decays, in_place=in_place)
    return combine(matrices, rest), {"adamw": adamw, "muon": muon}
