"""Ops as nodes of torch's autograd."""

from funcops.adapters.autograd.differentiable import differentiable as differentiable

__all__ = ["differentiable"]
