"""Exact rewrites of the float graph: the same outputs, in a form that quantizes better. The one exception has to be
asked for, and says so: `replace_clip6_relu`.

One file, one rewrite; `REWRITES` has them in the order in which they run. Each is a class with a name, whether it runs
unless told otherwise, and `apply`, which changes the model in place and says how often. They run in rounds until
nothing changes any more, since one makes room for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import onnx_ir as ir

from quark.account import Rewrite
from quark.errors import unknown_name
from quark.onnx.graph import infer_shapes, remove_dead
from quark.onnx.optimize.batch_norm_to_conv import BatchNormToConv
from quark.onnx.optimize.clip_to_relu import ClipToRelu
from quark.onnx.optimize.copy_bias_init import CopyBiasInit
from quark.onnx.optimize.copy_shared_init import CopySharedInit
from quark.onnx.optimize.fold_batch_norm import FoldBatchNorm
from quark.onnx.optimize.fold_constants import FoldConstants
from quark.onnx.optimize.fuse_gelu import FuseGelu
from quark.onnx.optimize.fuse_instance_norm import FuseInstanceNorm
from quark.onnx.optimize.fuse_l2_norm import FuseL2Norm
from quark.onnx.optimize.fuse_layer_norm import FuseLayerNorm
from quark.onnx.optimize.fuse_matmul_add import FuseMatmulAdd
from quark.onnx.optimize.fuse_pad_into_conv import FusePadIntoConv
from quark.onnx.optimize.options import OptimizeOptions
from quark.onnx.optimize.reduce_mean_to_global_average_pool import ReduceMeanToGlobalAveragePool
from quark.onnx.optimize.relu_forms import ReluForms
from quark.onnx.optimize.remove_identity import RemoveIdentity
from quark.onnx.optimize.replace_clip6_relu import ReplaceClip6Relu
from quark.onnx.optimize.rewrite import GraphRewrite
from quark.onnx.optimize.split_large_kernel_pool import SplitLargeKernelPool
from quark.onnx.optimize.split_to_slice import SplitToSlice

__all__ = ["REWRITES", "REWRITE_OF_OPTION", "GraphRewrite", "OptimizeOptions", "optimize"]

REWRITES: tuple[GraphRewrite, ...] = (
    RemoveIdentity(),
    FoldConstants(),
    FuseLayerNorm(),  # the three that know a ReduceMean as part of something, before it is taken for a pool
    FuseInstanceNorm(),
    FuseL2Norm(),
    FuseGelu(),
    FuseMatmulAdd(),  # gives the batch norm a Gemm to go into
    FoldBatchNorm(),
    BatchNormToConv(),  # what could not be folded
    FusePadIntoConv(),
    ReluForms(),
    ClipToRelu(),
    ReplaceClip6Relu(),
    ReduceMeanToGlobalAveragePool(),
    SplitLargeKernelPool(),
    SplitToSlice(),
    CopySharedInit(),
    CopyBiasInit(),
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

MAX_ROUNDS = 20  # a bound, not a tuning: rewrites only ever simplify, and real models come to rest after two or three


def optimize(model: ir.Model, options: OptimizeOptions | None = None) -> tuple[Rewrite, ...]:
    """Apply the rewrites in place; those that found something, with how often, in their order."""
    chosen = _chosen(OptimizeOptions() if options is None else options)
    counts: Counter[str] = Counter()
    for _ in range(MAX_ROUNDS):
        round_counts = Counter({rewrite.name: _apply(rewrite, model) for rewrite in chosen})
        counts += round_counts
        if not round_counts.total():
            break
        infer_shapes(model)
    return tuple(Rewrite(rewrite.name, counts[rewrite.name]) for rewrite in chosen if counts[rewrite.name])


def _apply(rewrite: GraphRewrite, model: ir.Model) -> int:
    count = rewrite.apply(model)
    if count:
        remove_dead(model)
    return count


def _chosen(options: OptimizeOptions) -> list[GraphRewrite]:
    known = {rewrite.name for rewrite in REWRITES}
    for name in sorted(options.enabled | options.disabled):
        if name not in known:
            raise unknown_name("rewrite", name, sorted(known))
    wanted = {rewrite.name for rewrite in REWRITES if rewrite.is_default} | options.enabled
    configured: dict[str, GraphRewrite] = {
        CopySharedInit.name: CopySharedInit(options.shared_init_op_types),
        CopyBiasInit.name: CopyBiasInit(options.bias_init_op_types),
    }
    return [configured.get(rewrite.name, rewrite) for rewrite in REWRITES if rewrite.name in wanted - options.disabled]
