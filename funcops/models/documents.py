"""Documents packed into one row, as `decoder(cfg, packed=True)` takes them: no token is spent on padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.engine.errors import check, describe, fail, require, require_count
from funcops.library.kernels.route import document_of

__all__ = ["PackedDocuments", "pack"]


class PackedDocuments(NamedTuple):
    """`ids` and `labels` [1, T], int64, and `cu_seqlens` [N + 1], int32, as `decoder_x` takes them."""

    ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor


def pack(
    documents: Sequence[Tensor], *, length: int | None = None, count: int | None = None, max_seqlen: int | None = None
) -> PackedDocuments:
    """Put documents, each [t] int64, one after another. A label is the next token of the same document, and -100 for its last one.

    `length`: T, by default the sum of their lengths; what is left is one more document, of zeros, without labels. `count`: N, by
    default the number of documents with that one; empty documents at the end make up for fewer. With both, batches have one shape,
    as a compiled or captured step needs. `max_seqlen`: the bound that `decoder` was given; what is left becomes documents of at
    most this length. Raises `ValueError` or `TypeError` for documents of another shape or dtype, for none, for a `length`, `count`
    or `max_seqlen` that is too small.

    >>> import torch
    >>> from funcops.models import pack
    >>> pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], length=6)
    PackedDocuments(ids=tensor([[5, 6, 7, 8, 9, 0]]), labels=tensor([[   6,    7, -100,    9, -100, -100]]), \
cu_seqlens=tensor([0, 3, 5, 6], dtype=torch.int32))
    """
    where = "pack"
    if not isinstance(documents, (list, tuple)) or not documents:
        fail(where, "documents", "a list of at least one tensor [t]", describe(documents))
    for i, one in enumerate(documents):
        check(where, f"documents[{i}]", one, (...,), torch.int64, documents[0] if i else None)
        require(one.dim() == 1, where, f"documents[{i}]", "[t]", list(one.shape))
    found, total = list(documents), sum(len(one) for one in documents)
    if max_seqlen is not None:
        require_count(where, max_seqlen=max_seqlen)
        longest = max(map(len, documents))
        require(longest <= max_seqlen, where, "max_seqlen", f"at least {longest}, the longest document", max_seqlen)
    if length is not None:
        require_count(where, length=length)
        require(length >= total, where, "length", f"at least {total}, the tokens of all documents", length)
        found += found[0].new_zeros(length - total).split(max_seqlen or length) if length > total else ()
    ends = torch.tensor([0, *(len(one) for one in found)]).cumsum(0).tolist()
    if count is not None:
        require_count(where, count=count)
        require(count >= len(found), where, "count", f"at least {len(found)}, the documents with the padding", count)
        ends += ends[-1:] * (count - len(found))
    ids, device = torch.cat(found), found[0].device
    labels = ids.roll(-1)
    labels[[end - 1 for end in ends[1:] if end]] = -100
    labels[total:] = -100
    return PackedDocuments(ids[None], labels[None], torch.tensor(ends, dtype=torch.int32, device=device))


def positions_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The position of each of `length` tokens in its document, [T], int64, without waiting for a device."""
    at = torch.arange(length, device=cu_seqlens.device)
    document = document_of(cu_seqlens, at)
    return at - cu_seqlens.long()[document.clamp(max=cu_seqlens.shape[0] - 2)]
