"""A network as an onnx_ir graph with a plan: translated, cleaned up, named, and adapted to the runtimes.

    biases      of layers with few bits are added by a node of their own
    clips       narrow activations are stored as 8-bit codes that are clipped first
    pools       the quantizer behind a mean goes on both sides of the Flatten that ONNX needs there
    kernels     the same quantizer goes on both sides of an activation that ONNX Runtime keeps

None of these changes a value that torch computes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from quark.decide.choose import choices_before_clips
from quark.decide.placement import FusedActivation
from quark.errors import InvalidValueError
from quark.formats.affine import integer_format
from quark.onnx.graph import add_initializer, add_node, constant, fresh_name, is_read_once, readers, replace_input
from quark.onnx.insert.pairs import OPSET_OF_FLOAT8
from quark.onnx.load import load
from quark.onnx.optimize import REWRITES, OptimizeOptions, optimize
from quark.onnx.view import view_of
from quark.plan import AffineChoice, Choice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.torch.export.plan_of_taps import give_names, remove_taps, rename
from quark.torch.export.translate import Tap, translate, with_taps

# Exact rewrites that leave quantizers where they are, and make way for integer kernels and NPUs.
_REWRITES = frozenset(
    {
        *("remove_identity", "fold_constants", "fuse_gelu", "fuse_pad_into_conv", "relu_forms", "clip_to_relu"),
        "reduce_mean_to_global_average_pool",
    }
)
_PLAIN_OPSET, _WIDE_OPSET, NEWEST_OPSET = 18, 21, 23
_MOVES = frozenset({"Concat", "Flatten", "MaxPool", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})


def exported_graph(
    network: fx.GraphModule, example: Sequence[torch.Tensor], free: Sequence[set[int]], *, opset: int | None
) -> tuple[ir.Model, QuantizationPlan, dict[str, ir.Value]]:
    """Return what the network computes without its quantizers, and the plan that says where they were. `free` has the
    free axes of each input.

    The third result has the computed values by their names in torch, without those that are rounded for an integer
    kernel.
    """
    tapped, taps = with_taps(network)
    choices = [tap.choice for tap in taps if tap.choice is not None]
    is_half = any(tensor.dtype is torch.float16 for tensor in (*example, *network.parameters()))
    version = choose_opset(choices, is_half=is_half, wanted=opset)
    model = load(translate(tapped, example, free, opset=version)).model
    own_plan = getattr(network, "plan", None)  # a frozen network has one, a float network does not
    own_choices = own_plan if isinstance(own_plan, QuantizationPlan) else ()
    rewrites = _REWRITES if choices else frozenset[str]()
    return planned_graph(model, taps, rewrites, {entry.tensor: entry.reason for entry in own_choices})


def planned_graph(
    model: ir.Model, taps: Sequence[Tap], rewrites: frozenset[str], reasons: Mapping[str, str]
) -> tuple[ir.Model, QuantizationPlan, dict[str, ir.Value]]:
    """Take the taps out of a translated network; the results are those of `exported_graph`."""
    if rewrites:
        optimize(model, OptimizeOptions(disabled=frozenset(rewrite.name for rewrite in REWRITES) - rewrites))
    places = remove_taps(model, taps)
    give_names(model)
    planned = places.plan(reasons)
    moved = _add_biases_apart(model, planned)
    plan = _clip_narrow_codes(model, planned)
    pooled = _choices_of_pools(model, plan, places.values.values())
    added = {**_kernel_choices(model, plan), **pooled}
    values = {}
    for tensor, original in places.values.items():
        value = moved.get(original, original)
        producer = value.producer()
        source = producer.inputs[0] if producer is not None and producer.inputs else None
        is_reshaped_pool = source is not None and source.name in pooled
        if value.name not in added and not is_reshaped_pool:
            values[tensor] = value
    return model, replace(plan, tensors=(*plan.tensors, *added.values())), values


def choose_opset(choices: Sequence[Choice], *, is_half: bool, wanted: int | None) -> int:
    """Return the opset for these choices, or the wanted one, if it is possible.

    18 is what torch's exporter writes and every supported ONNX Runtime takes. The standard's QuantizeLinear takes 16
    and 4 bits and scales for groups from 21 on, and float16 data and 8-bit floats from 19 on.
    """
    integers = [choice for choice in choices if isinstance(choice, AffineChoice)]
    has_groups = any(integer.group_size is not None for integer in integers)
    has_float8 = any(isinstance(choice, FloatChoice) and choice.is_eight_bits for choice in choices)
    if wanted is None:
        is_wide = is_half or has_groups or any(integer_format(integer.format).bits in (4, 16) for integer in integers)
        return _WIDE_OPSET if is_wide else OPSET_OF_FLOAT8 if has_float8 else _PLAIN_OPSET
    if wanted < _WIDE_OPSET and has_groups:
        raise InvalidValueError(f"opset {wanted}: scales for groups need {_WIDE_OPSET} or newer")
    if wanted < OPSET_OF_FLOAT8 and has_float8:
        raise InvalidValueError(f"opset {wanted}: 8-bit floats need {OPSET_OF_FLOAT8} or newer")
    return wanted


# ---- biases ----
def _add_biases_apart(model: ir.Model, plan: QuantizationPlan) -> dict[ir.Value, ir.Value]:
    """Split biases off, in place, and map each result of a layer to the one with its bias.

    ONNX Runtime rounds the float bias of a quantized layer to steps of activation scale times weight scale. With 8 bits
    that is far below what the layer itself rounds; with 4 it is not. Behind an Add, the bias stays exact. The result
    keeps its name, so that the plan still fits.
    """
    moved: dict[ir.Value, ir.Value] = {}
    read = {reader: entry.choice for entry in plan for reader in entry.readers}
    for node in list(model.graph):
        *operands, bias_choice = (read.get(Reader(str(node.name), index)) for index in range(3))
        integers = [integer_format(operand.format) for operand in operands if isinstance(operand, AffineChoice)]
        has_few_bits = len(integers) == 2 and any(integer.bits < 8 for integer in integers)
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or not has_few_bits or bias_choice is not None:
            continue
        bias = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        if bias is None or bias.ndim != 1:
            continue
        result = node.outputs[0]
        rank = 2 if node.op_type == "Gemm" else len(result.shape or ()) or 4
        array = np.ascontiguousarray(bias.reshape((1, -1, *[1] * (rank - 2))))
        spread = add_initializer(model, fresh_name(model, f"{node.name}_bias"), array)
        name, following = str(result.name), readers(result)
        added = ir.node("Add", [result, spread], name=fresh_name(model, f"{node.name}/Add"))
        total = moved[result] = added.outputs[0]
        result.name = fresh_name(model, f"{name}_sum")
        total.name, total.shape, total.type = name, result.shape, result.type
        for reader, index in following:
            replace_input(reader, index, total)
        for index, output in enumerate(model.graph.outputs):
            if output is result:
                model.graph.outputs[index] = total
        node.resize_inputs(2)
        model.graph.insert_after(node, added)
    return moved


# ---- clips ----
def _clip_narrow_codes(model: ir.Model, plan: QuantizationPlan) -> QuantizationPlan:
    """Store activations of 2 to 7 bits as 8-bit codes that are clipped first: put the clips into the model, in place,
    and return the plan for their results.

        Q4(x)   =   Q8(clip(x, (qmin - z) s, (qmax - z) s)),     both with scale s and zero point z

    ONNX has types of 4 bits and none of 3 or 6, and ONNX Runtime refuses a file in which a Relu stands before a
    QuantizeLinear of 4 bits. Constants are not affected: their codes are stored, not computed. Nor is a value that was
    clipped already and only moved since: ONNX Runtime breaks files with a Clip between a Reshape and a QuantizeLinear.
    """
    clipped: dict[str, AffineChoice] = {}  # the narrow codes that a value is known to have
    tensors = []
    for entry in plan:
        choice = entry.choice
        if entry.role is Role.ACTIVATION and isinstance(choice, AffineChoice) and choice.axis is None:
            is_narrow = integer_format(choice.format).bits < 8
            entry = _clipped(model, entry, choice, clipped) if is_narrow else entry
        tensors.append(entry)
    return replace(plan, tensors=tuple(tensors))


def _clipped(
    model: ir.Model, entry: TensorChoice, choice: AffineChoice, clipped: dict[str, AffineChoice]
) -> TensorChoice:
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    value = next(value for value in values if value.name == entry.tensor)
    producer, fmt = value.producer(), integer_format(choice.format)
    wide = replace(choice, format="int8" if fmt.signed else "uint8")
    if producer is not None and not producer.domain and producer.op_type in _MOVES:
        moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        if all(source is not None and clipped.get(str(source.name)) == choice for source in moved):
            clipped[entry.tensor] = choice
            return replace(entry, choice=wide)
    dtype = np.float16 if value.dtype is ir.DataType.FLOAT16 else np.float32
    scale, zero_point = np.float32(choice.scale[0]), choice.zero_point[0]
    bounds = [
        add_initializer(model, f"{entry.tensor}_{name}", np.array((code - zero_point) * scale, dtype))
        for name, code in (("lowest", fmt.qmin), ("highest", fmt.qmax))
    ]
    first = next(iter(model.graph)) if producer is None else None
    name = f"{entry.tensor}_{choice.format}"
    clip = add_node(model, "Clip", [value, *bounds], before=first, after=producer, name=name).outputs[0]
    clip.shape = value.shape
    for reader in entry.readers:
        if reader.is_graph_output:
            old = model.graph.outputs[reader.index]
            name, old.name = str(old.name), f"{old.name}_unclipped"
            rename(model, clip, name)
            model.graph.outputs[reader.index] = clip
        else:
            replace_input(next(node for node in model.graph if node.name == reader.node), reader.index, clip)
    clipped[str(clip.name)] = choice
    reason = f"{entry.reason}; {choice.format}, clipped".removeprefix("; ")
    return replace(entry, tensor=str(clip.name), choice=wide, reason=reason)


# ---- pools ----
def _choices_of_pools(
    model: ir.Model, plan: QuantizationPlan, of_torch: Collection[ir.Value]
) -> dict[str, TensorChoice]:
    """Return the choices to add to the plan, by tensor, for means over an image.

    torch's mean over two axes drops them; ONNX has GlobalAveragePool and then Flatten. Between the two would be a float
    tensor, which no integer kernel and no NPU takes. The same quantizer before and behind changes no value. Tensors
    that torch has too are left as they are there.
    """
    known = {entry.tensor: entry for entry in plan}
    others = {str(value.name) for value in of_torch}
    tensors: dict[str, TensorChoice] = {}
    for node in model.graph:
        behind = known.get(str(node.outputs[0].name))
        source = node.inputs[0] if node.inputs else None
        if node.op_type not in ("Flatten", "Reshape", "Squeeze") or behind is None or source is None:
            continue
        producer, name = source.producer(), str(source.name)
        is_pool = producer is not None and producer.op_type == "GlobalAveragePool"
        if is_pool and name not in known and name not in others and isinstance(behind.choice, AffineChoice):
            reader = Reader(str(node.name), 0)
            tensors[name] = TensorChoice(name, behind.role, behind.choice, (reader,), "as behind the Flatten")
    return tensors


# ---- kernels ----
def _kernel_choices(model: ir.Model, plan: QuantizationPlan) -> dict[str, TensorChoice]:
    """Return the choices that ONNX Runtime's integer kernels need beyond the plan, by the name of an activation's
    result, which is then rounded before its own quantizer.

    A convolution whose Relu or Clip the runtime keeps is not an integer kernel unless the same quantizer stands on both
    sides of that activation; it changes no value (`choices_before_clips` has the reason). Files with
    power-of-two scales are for NPUs, which compute both at once: there nothing is added.
    """
    activations = [entry.choice for entry in plan if entry.role is Role.ACTIVATION]
    scales = [choice.scale[0] for choice in activations if isinstance(choice, AffineChoice)]
    if all(math.frexp(scale)[0] == 0.5 for scale in scales):
        return {}
    quantized = {reader.node for entry in plan for reader in entry.readers}
    readings = Counter(entry.tensor for entry in plan for _ in entry.readers)
    planned = {entry.tensor for entry in plan}
    fused = []  # Relu and Clip behind a layer that computes with quantized numbers, if nothing else reads its result
    for node in model.graph:
        value = node.inputs[0] if node.inputs and node.op_type in ("Relu", "Clip") else None
        producer = None if value is None else value.producer()
        if value is None or producer is None or producer.name not in quantized:
            continue
        result = node.outputs[0]
        reads = len(result.uses()) + sum(output is result for output in model.graph.outputs)
        is_layer = producer.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
        is_inner = is_read_once(value) and str(value.name) not in planned
        if is_layer and is_inner and result.name in planned and readings[str(result.name)] == reads:
            fused.append(FusedActivation(str(value.name), str(node.name), str(result.name)))
    return choices_before_clips(view_of(model), fused, plan)
