"""Rewrites for what hardware and runtimes have in one form only: padding, pooling, splitting, resizing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    become,
    constant,
    dimensions,
    input_value,
    is_float,
    rank,
    readers,
    remove_node,
    replace_input,
    replace_value,
    set_constant,
)
from quark.onnx.optimize.rewrite import integers, per_node, reduction_axes

Array = NDArray[Any]
MAX_KERNEL = 512  # elements that some hardware can pool over

# ---- fuse_pad_into_conv ----


@per_node("Pad")
def fuse_pad_into_conv(model: ir.Model, pad: ir.Node) -> bool:
    """Move the padding of a Pad into the Conv behind it.

        Conv(Pad(x, p), pads=q)   becomes   Conv(x, pads=p+q)

    Applies when the Pad is constant, fills with zeros, pads only spatial axes and crops none, and all its readers are
    Convs with explicit pads (`auto_pad` depends on the size of the input).
    """
    source, output = input_value(pad, 0), pad.outputs[0]
    pads, uses = _spatial_pads(pad), readers(output)
    if pads is None or not uses or output.is_graph_output():
        return False
    for node, index in uses:
        is_conv = node.op_type == "Conv" and not node.domain and index == 0
        if not is_conv or attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            return False
    for conv, _ in uses:
        own = list(attribute(conv, "pads") or [0] * len(pads))
        conv.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, pads, strict=True)])
        conv.attributes.pop("auto_pad", None)
        replace_input(conv, 0, source)
    remove_node(pad)
    return True


def _spatial_pads(pad: ir.Node) -> list[int] | None:
    """The pads of the axes from the third on, beginnings before ends, if a Conv can do the same."""
    given, size = integers(input_value(pad, 1)), rank(input_value(pad, 0))
    filling = constant(input_value(pad, 2))
    if attribute(pad, "mode", "constant") != "constant" or given is None or size is None or size < 3:
        return None
    if input_value(pad, 2) is not None and (filling is None or filling.any()):
        return None
    axes = list(range(size)) if input_value(pad, 3) is None else integers(input_value(pad, 3))
    if axes is None or len(given) != 2 * len(axes):
        return None
    pads = [0] * (2 * size)
    for position, axis in enumerate(axes):
        pads[axis % size] = given[position]
        pads[axis % size + size] = given[position + len(axes)]
    if any(amount < 0 for amount in pads) or any(pads[i] for i in (0, 1, size, size + 1)):
        return None
    return pads[2:size] + pads[size + 2 :]


# ---- reduce_mean_to_global_average_pool ----


@per_node("ReduceMean")
def reduce_mean_to_global_average_pool(model: ir.Model, mean: ir.Node) -> bool:
    """Turn a mean over all spatial axes into GlobalAveragePool.

        ReduceMean(x, axes=[2, 3 ...], keepdims=1)   becomes   GlobalAveragePool(x)
        ReduceMean(x, axes=[2, 3 ...], keepdims=0)   becomes   Flatten(GlobalAveragePool(x))

    for which runtimes have an integer kernel. Applies to float tensors of known rank, when the axes are all those from
    the third on.
    """
    value = input_value(mean, 0)
    size = rank(value)
    if value is None or not is_float(value) or size is None or size < 3:
        return False
    if reduction_axes(model, mean) != list(range(2, size)):
        return False
    if attribute(mean, "keepdims", 1):
        become(mean, "GlobalAveragePool", [value])
        return True
    pool = add_node(model, "GlobalAveragePool", [value], before=mean, name=f"{mean.name}_pool")
    assert value.shape is not None
    pool.outputs[0].shape = ir.Shape([*value.shape[:2], *[1] * (size - 2)])
    become(mean, "Flatten", [pool.outputs[0]], {"axis": 1})
    return True


# ---- split_large_kernel_pool ----


@per_node("GlobalAveragePool")
def split_large_kernel_pool(model: ir.Model, pool: ir.Node) -> bool:
    """Split a GlobalAveragePool over a large image into an AveragePool and a smaller GlobalAveragePool.

        mean over H*W   becomes   the mean of the means over tiles of h*w

    where h is the largest divisor of H up to its root, and w that of W: tiles of a square image are squares, for which
    it is known how an NPU divides. Some hardware pools over 512 elements at most. Applies when the image is larger than
    that, its size is known, and neither of the two pools is. Has to be enabled; it is for NPUs.
    """
    value = input_value(pool, 0)
    dims = dimensions(value)
    if value is None or value.shape is None or dims is None or len(dims) != 4 or dims[2] is None or dims[3] is None:
        return False
    height, width = dims[2], dims[3]
    if height * width <= MAX_KERNEL:
        return False

    tile = tuple(max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0) for size in (height, width))
    if max(math.prod(tile), (height // tile[0]) * (width // tile[1])) > MAX_KERNEL:
        return False
    attributes = {"kernel_shape": list(tile), "strides": list(tile)}
    first = add_node(model, "AveragePool", [value], before=pool, name=f"{pool.name}_tiles", attributes=attributes)
    first.outputs[0].shape = ir.Shape([*value.shape[:2], height // tile[0], width // tile[1]])
    replace_input(pool, 0, first.outputs[0])
    return True


# ---- split_to_slice ----


@per_node("Split")
def split_to_slice(model: ir.Model, split: ir.Node) -> bool:
    """Turn a Split into one Slice for each of its outputs.

        Split(x) into sizes s0, s1 ...   becomes   x[0 : s0], x[s0 : s0 + s1] ...   along its axis

    for hardware that has no Split. Applies when the sizes are known: a constant, or equal parts of a known size. Has to
    be enabled; it is for NPUs.
    """
    count, sizes = len(split.outputs), integers(input_value(split, 1))
    if input_value(split, 1) is None:
        dims = dimensions(input_value(split, 0))
        size = dims[attribute(split, "axis", 0)] if dims is not None else None
        if size is not None:
            part = -(-size // count)  # since opset 18 the last part may be smaller
            sizes = [part] * (count - 1) + [size - part * (count - 1)]
    if sizes is None or len(sizes) != count:
        return False
    axis = add_initializer(model, f"{split.name}_axis", np.array([attribute(split, "axis", 0)], np.int64))
    bounds = np.cumsum([0, *sizes])
    for index, output in enumerate(split.outputs):
        start, end = (
            add_initializer(model, f"{split.name}_{what}", np.array([bounds[index + more]], np.int64))
            for what, more in (("start", 0), ("end", 1))
        )
        inputs = [input_value(split, 0), start, end, axis]
        part = add_node(model, "Slice", inputs, before=split, name=f"{split.name}_slice")
        replace_value(output, part.outputs[0])
    remove_node(split)
    return True


# ---- resize_all_axes ----


@per_node("Resize")
def resize_all_axes(model: ir.Model, resize: ir.Node) -> bool:
    """Give a Resize of some axes a scale or a size for each.

        Resize(x, scales=[2, 2], axes=[2, 3])   becomes   Resize(x, scales=[1, 1, 2, 2])
        Resize(x, sizes=[8, 8], axes=[2, 3])    becomes   Resize(x, sizes=[n, c, 8, 8])

    Where ONNX Runtime computes convolutions with channels last, it reorders scales and sizes without looking at `axes`,
    and refuses the network or fails when it runs. Other sizes are those of x; unless they are constant, they are read
    from its shape. Sizes that keep the aspect ratio become one scale. Applies when scales are constant and nothing is
    cropped; a scale must give the same sizes, of which it is rounded down.
    """
    axes, size = attribute(resize, "axes"), rank(input_value(resize, 0))
    mode = attribute(resize, "coordinate_transformation_mode", "half_pixel")
    if not axes or size is None or mode == "tf_crop_and_resize":
        return False
    places = [axis % size for axis in axes]
    scales = constant(input_value(resize, 2))
    policy = attribute(resize, "keep_aspect_ratio_policy", "stretch")
    if input_value(resize, 3) is not None and policy != "stretch":
        scales = _common_scale(resize, places, max if policy == "not_smaller" else min)
        if scales is None or min(axes) < 0:  # ONNX Runtime leaves negative axes as they are here
            return False
        replace_input(resize, 3, None)
        resize.attributes.pop("keep_aspect_ratio_policy")
    if scales is not None and scales.size == len(axes):
        whole = np.ones(size, scales.dtype)
        whole[places] = scales
        set_constant(model, resize, 2, whole)
    elif input_value(resize, 3) is not None:
        _size_all_axes(model, resize, places)
    else:
        return False
    resize.attributes.pop("axes")
    return True


def _common_scale(resize: ir.Node, places: list[int], choose: Callable[[Array], np.float32]) -> Array | None:
    """The scale that keeps the aspect ratio, for each axis; None if it is unknown, or gives other sizes."""
    sizes, shape = constant(input_value(resize, 3)), dimensions(input_value(resize, 0))
    known = [shape[place] for place in places] if shape else [None]
    if sizes is None or None in known:
        return None
    before = np.array(known, np.float32)
    scale = choose(sizes.astype(np.float32) / before)
    exact = before * scale
    return np.full(len(places), scale) if (np.floor(exact) == np.floor(exact + 0.5)).all() else None


def _size_all_axes(model: ir.Model, resize: ir.Node, places: list[int]) -> None:
    sizes, input_shape = constant(input_value(resize, 3)), dimensions(input_value(resize, 0))
    whole = dict(enumerate(input_shape or ()))
    if sizes is not None:
        whole |= dict(zip(places, map(int, sizes), strict=True))
    if sizes is not None and None not in whole.values():
        set_constant(model, resize, 3, np.array(list(whole.values()), np.int64))
        return
    shape = add_node(model, "Shape", [input_value(resize, 0)], before=resize, name=f"{resize.name}_shape")
    shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    index = add_initializer(model, f"{resize.name}_axes", np.array(places, np.int64))
    inputs = [shape.outputs[0], index, input_value(resize, 3)]
    filled = add_node(model, "ScatterElements", inputs, before=resize, name=f"{resize.name}_sizes")
    replace_input(resize, 3, filled.outputs[0])
