"""The bytes that a ledger counts."""

import torch

from funcops import Ledger


def test_sizes_give_an_order_by_bytes():
    ledger = Ledger()
    for name, n in (("small", 1), ("large", 8), ("middle", 3)):
        ledger.keep(name, {"t": torch.ones(n)})
    assert sorted(ledger.waiting, key=ledger.sizes.get, reverse=True) == ["large", "middle", "small"]
    assert sum(ledger.sizes.values()) == ledger.nbytes == 48
    ledger.discard()
    assert ledger.sizes == {}
