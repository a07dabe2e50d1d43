"""Optimize: the graph is rewritten into the form that is quantized. What it computes stays the same.

    decompose_attention    products of queries, keys and values, which the fused operator hides
    fuse_batch_norm        a convolution or linear layer with the batch norm behind it becomes one layer that trains

The order matters: it is that of REWRITES.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.account import Rewrite
from quark.torch.graph import Network
from quark.torch.optimize.decompose_attention import decompose_attention
from quark.torch.optimize.fuse_batch_norm import fuse_batch_norm

REWRITES: tuple[tuple[str, Callable[[Network], int]], ...] = (
    ("decompose_attention", decompose_attention),
    ("fuse_batch_norm", fuse_batch_norm),
)

__all__ = ["REWRITES", "optimize"]


def optimize(network: Network) -> tuple[Rewrite, ...]:
    """Apply all rewrites, in place, and say how often each did something."""
    counts = [(name, rewrite(network)) for name, rewrite in REWRITES]
    network.graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    network.graph.lint()
    network.recompile()
    return tuple(Rewrite(name, count) for name, count in counts if count)
