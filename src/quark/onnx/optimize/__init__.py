"""Exact rewrites of the float graph: the same outputs, in a form that quantizes better. The one exception has to be
enabled, and its documentation says so: `replace_clip6_relu`.

`REWRITES` lists them in the order in which they run: functions that change the model in place and return how often.
They run in rounds until nothing changes any more, because one rewrite can make another possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from quark.account import Rewrite
from quark.errors import unknown_name
from quark.onnx.graph import infer_shapes, remove_dead
from quark.onnx.optimize.activations import clip_to_relu, fuse_gelu, relu_forms, replace_clip6_relu
from quark.onnx.optimize.batch_norms import batch_norm_to_conv, fold_batch_norm, fuse_matmul_add
from quark.onnx.optimize.constants import copy_bias_init, copy_shared_init, fold_constants, remove_identity
from quark.onnx.optimize.normalizations import fuse_instance_norm, fuse_l2_norm, fuse_layer_norm
from quark.onnx.optimize.pools_and_pads import (
    fuse_pad_into_conv,
    reduce_mean_to_global_average_pool,
    resize_all_axes,
    split_large_kernel_pool,
    split_to_slice,
)
from quark.onnx.optimize.rewrite import Apply, GraphRewrite

__all__ = ["FOR_NPUS", "FUSIONS", "REWRITES", "REWRITE_OF_OPTION", "GraphRewrite", "OptimizeOptions", "optimize"]

REWRITES: tuple[GraphRewrite, ...] = (
    GraphRewrite(remove_identity),
    GraphRewrite(fold_constants),
    GraphRewrite(fuse_layer_norm),  # these three look for a ReduceMean, which becomes a pool below
    GraphRewrite(fuse_instance_norm),
    GraphRewrite(fuse_l2_norm),
    GraphRewrite(fuse_gelu),
    GraphRewrite(fuse_matmul_add),  # makes the Gemm that a batch norm can be folded into
    GraphRewrite(fold_batch_norm),
    GraphRewrite(batch_norm_to_conv, is_default=False),  # for normalizations that could not be folded
    GraphRewrite(fuse_pad_into_conv),
    GraphRewrite(relu_forms),
    GraphRewrite(clip_to_relu),
    GraphRewrite(replace_clip6_relu, is_default=False),
    GraphRewrite(reduce_mean_to_global_average_pool),
    GraphRewrite(resize_all_axes),
    GraphRewrite(split_large_kernel_pool, is_default=False),
    GraphRewrite(split_to_slice, is_default=False),
    GraphRewrite(copy_shared_init, is_default=False),
    GraphRewrite(copy_bias_init, is_default=False),
)

# The extra options that turn one rewrite on or off.
REWRITE_OF_OPTION: Mapping[str, str] = MappingProxyType(
    {
        "FoldBatchNorm": "fold_batch_norm",
        "ConvertBNToConv": "batch_norm_to_conv",
        "ConvertReduceMeanToGlobalAvgPool": "reduce_mean_to_global_average_pool",
        "ConvertSplitToSlice": "split_to_slice",
        "ConvertClipToRelu": "clip_to_relu",
        "ReplaceClip6Relu": "replace_clip6_relu",
        "SplitLargeKernelPool": "split_large_kernel_pool",
        "FuseInstanceNorm": "fuse_instance_norm",
        "FuseL2Norm": "fuse_l2_norm",
        "FuseGelu": "fuse_gelu",
        "FuseLayerNorm": "fuse_layer_norm",
        "CopySharedInit": "copy_shared_init",
        "CopyBiasInit": "copy_bias_init",
    }
)

# Rewrites that do not depend on whether the graph is to be optimized: runtimes and compilers know the fused operators,
# and their parts would be quantized one by one.
FUSIONS = frozenset({"fuse_layer_norm", "fuse_instance_norm", "fuse_l2_norm", "fuse_gelu"})

# Rewrites that a network for an NPU gets although they are off by default.
FOR_NPUS = frozenset({"split_large_kernel_pool", "split_to_slice"})

MAX_ROUNDS = 20  # only a bound: rewrites always simplify, and real models take two or three rounds


@dataclass(frozen=True)
class OptimizeOptions:
    """Names of rewrites: those on by default that are `disabled`, and those off by default that are `enabled`.

    The two lists of operators say where `copy_shared_init` and `copy_bias_init` apply once enabled; empty means
    everywhere.
    """

    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    shared_init_op_types: tuple[str, ...] = ()
    bias_init_op_types: tuple[str, ...] = ()
    has_channels_last: bool = False  # `to_channels_last`, which the pipeline calls before: samples have to follow

    @property
    def changes_outputs(self) -> bool:
        """True if a rewrite that is not exact is enabled."""
        return "replace_clip6_relu" in self.enabled


def optimize(model: ir.Model, options: OptimizeOptions | None = None) -> tuple[Rewrite, ...]:
    """Apply the rewrites in place; return those that changed something, with how often, in their order."""
    options = options or OptimizeOptions()
    known = {rewrite.name for rewrite in REWRITES}
    for name in sorted(options.enabled | options.disabled):
        if name not in known:
            raise unknown_name("rewrite", name, sorted(known))
    wanted = ({rewrite.name for rewrite in REWRITES if rewrite.is_default} | options.enabled) - options.disabled
    configured: dict[str, Apply] = {
        "copy_shared_init": partial(copy_shared_init, op_types=options.shared_init_op_types),
        "copy_bias_init": partial(copy_bias_init, op_types=options.bias_init_op_types),
    }
    chosen = {
        rewrite.name: configured.get(rewrite.name, rewrite.apply) for rewrite in REWRITES if rewrite.name in wanted
    }
    counts: Counter[str] = Counter()
    for _ in range(MAX_ROUNDS):
        before = counts.total()
        for name, apply in chosen.items():
            count = apply(model)
            counts[name] += count
            if count:
                remove_dead(model)
        if counts.total() == before:
            break
        infer_shapes(model)
    return tuple(Rewrite(name, counts[name]) for name in chosen if counts[name])
