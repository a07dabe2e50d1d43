"""An ONNX network as a torch module: an interpreter that computes one node after the other, so that all of it trains.

Float constants of more than one number are parameters, except for the statistics of BatchNormalization and what says
how to compute (scales of Resize). All other constants are buffers. Floats are float32, integers int64, whatever the
width in the file. Quantizers round with the gradient of the identity, and none beyond the range.

One row for each operator: those of finetuning, and here those that work with shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError
from quark.features.finetuning.operators import OPERATORS
from quark.features.finetuning.quantizers import Quantizer, quantizer_of, straight_through, tensor_of
from quark.formats.block import BlockQuantizer
from quark.formats.spec import ScaleRule
from quark.onnx.graph import attribute, constant
from quark.onnx.large_tensors import split
from quark.onnx.save import SaveOptions, write_model
from quark.plan import BlockChoice, Choice, DynamicChoice, QuantizationPlan

JOINED_ON = ("cuda",)  # devices where weights are rounded together

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Row = Callable[[Sequence[Any], Attributes], Any]
Place = tuple[str, int]  # a node and the number of its input; '' and the number of an output of the graph
Sample = Mapping[str, Any]  # arrays by the name of the input
Tensors = dict[str, torch.Tensor]

_STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4), ("Resize", 1), ("Resize", 2), ("Pad", 2)}
# Inputs that say how to compute. They are lists, and stay on the host: reading them from a GPU would wait for it.
_LISTS = {
    "Clip": (1, 2),
    "Expand": (1,),
    "Pad": (1, 2, 3),
    "ReduceMean": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
}


def _clip(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    x, *limits = inputs
    # numbers of the type of x, since a float limit would make integers floats
    lowest, highest = (*(None if limit is None else limit.item() for limit in limits), None, None)[:2]
    return x if lowest is None and highest is None else torch.clamp(x, lowest, highest)


def _slice(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    x, starts, ends = inputs[:3]
    axes, steps = (*inputs[3:], None, None)[:2]
    names = range(len(starts)) if axes is None else [int(axis) % x.dim() for axis in axes]
    for place, axis in enumerate(names):
        size, step = x.shape[axis], 1 if steps is None else int(steps[place])
        wanted = range(size)[slice(int(starts[place]), int(ends[place]), step)]
        if step < 0 and int(ends[place]) < -size:  # beyond the first element, which Python cannot write as a number
            wanted = range(size)[slice(int(starts[place]), None, step)]
        x = x.index_select(axis, torch.tensor(list(wanted), dtype=torch.int64, device=x.device))
    part: torch.Tensor = x
    return part


def _gather(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    x, index = inputs
    axis = int(attributes.get("axis", 0)) % x.dim()
    index = torch.where(index < 0, index + x.shape[axis], index).to(x.device)
    gathered = x.index_select(axis, index.reshape(-1))
    return gathered.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])  # type: ignore[no-any-return]


def _cast(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    kind = ir.DataType(int(attributes["to"]))
    if kind == ir.DataType.BOOL:
        return inputs[0].to(torch.bool)  # type: ignore[no-any-return]
    return inputs[0].to(torch.float32 if kind.is_floating_point() else torch.int64)  # type: ignore[no-any-return]


def _split(inputs: Sequence[Any], attributes: Attributes) -> tuple[torch.Tensor, ...]:
    axis = int(attributes.get("axis", 0))
    if len(inputs) > 1 and inputs[1] is not None:
        return tuple(torch.split(inputs[0], [int(size) for size in inputs[1]], axis))
    count = int(attributes.get("num_outputs") or attributes["outputs"])
    return tuple(torch.split(inputs[0], -(-inputs[0].shape[axis] // count), axis))


def _constant_of_shape(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    value = attributes.get("value")
    fill = torch.zeros(1) if value is None else _tensor(value.numpy())
    return fill.reshape(()).expand([int(size) for size in inputs[0]]).clone()


def _expand(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    ones = torch.ones([int(size) for size in inputs[1]], dtype=inputs[0].dtype, device=inputs[0].device)
    return inputs[0] * ones if ones.dtype != torch.bool else inputs[0] & ones  # type: ignore[no-any-return]


def _resize(inputs: Sequence[Any], attributes: Attributes) -> torch.Tensor:
    x, _, scales, sizes = (*inputs, None, None, None)[:4]
    mode = str(attributes.get("mode", "nearest"))
    where = str(attributes.get("coordinate_transformation_mode", "half_pixel"))
    axes = [int(axis) % x.dim() for axis in attributes.get("axes") or range(x.dim())]
    if sizes is not None and len(sizes):
        wanted = {axis: int(size) for axis, size in zip(axes, sizes, strict=True)}
        ratios = {axis: size / x.shape[axis] for axis, size in wanted.items()}
    else:
        ratios = {axis: float(scale) for axis, scale in zip(axes, scales, strict=True)}
        wanted = {axis: int(x.shape[axis] * scale) for axis, scale in ratios.items()}
    changed = [axis for axis in axes if (wanted[axis], ratios[axis]) != (x.shape[axis], 1)]
    is_plain = not attributes.get("antialias", 0) and attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    is_exact = all(wanted[axis] == x.shape[axis] * ratios[axis] for axis in changed)
    is_of_images = x.dim() == 4 and set(changed) <= {2, 3}
    spatial = [wanted.get(axis, x.shape[axis]) for axis in range(2, x.dim())]
    if mode == "nearest" and is_plain and where != "tf_crop_and_resize":
        rounding = str(attributes.get("nearest_mode", "round_prefer_floor"))
        # torch takes the last number before the new one
        is_floor = (where, rounding) == ("asymmetric", "floor") or (where == "half_pixel" and "round" in rounding)
        if is_floor and is_of_images and all(spatial[i] % x.shape[i + 2] == 0 for i in (0, 1)):
            return torch.nn.functional.interpolate(x, spatial, mode="nearest")
        for axis in changed:
            index = _nearest(x.shape[axis], wanted[axis], ratios[axis], where, rounding)
            x = x.index_select(axis, torch.from_numpy(index).to(x.device))
        return x  # type: ignore[no-any-return]
    # the two are the same where more than one number is wanted
    is_halved = where == "half_pixel" or (where == "pytorch_half_pixel" and 1 not in spatial)
    if mode == "linear" and is_plain and is_exact and is_of_images and is_halved:
        return torch.nn.functional.interpolate(x, spatial, mode="bilinear", align_corners=False)
    raise InvalidValueError(f"Resize of mode '{mode}', '{where}' to {spatial} is not computed here")


def _nearest(size: int, wanted: int, ratio: float, where: str, rounding: str) -> NDArray[np.int64]:
    """Which number each place of a resized axis has, in float32 as ONNX Runtime computes it."""
    place, scale = np.arange(wanted, dtype=np.float32), np.float32(ratio)
    half = np.float32(0.5)
    if where == "asymmetric":
        place = place / scale
    elif where == "align_corners":
        place = place * np.float32(size - 1) / np.float32(max(wanted - 1, 1))
    elif where == "pytorch_half_pixel" and wanted == 1:
        place = np.zeros(1, np.float32)
    else:
        place = (place + half) / scale - half
        if where == "half_pixel_symmetric":
            place = place + np.float32(size) * half * (1 - np.float32(wanted) / (scale * np.float32(size)))
    index = {
        "floor": np.floor(place),
        "ceil": np.ceil(place),
        "round_prefer_floor": np.ceil(place - half),
        "round_prefer_ceil": np.floor(place + half),
    }[rounding]
    positions: NDArray[np.int64] = np.clip(index, 0, size - 1).astype(np.int64)
    return positions


ROWS: Mapping[str, Row] = {
    **OPERATORS,
    "Abs": lambda inputs, attributes: torch.abs(inputs[0]),
    "And": lambda inputs, attributes: torch.logical_and(inputs[0], inputs[1]),
    "Cast": _cast,
    "Clip": _clip,
    "ConstantOfShape": _constant_of_shape,
    "Dropout": lambda inputs, attributes: inputs[0],  # at inference
    "Equal": lambda inputs, attributes: torch.eq(inputs[0], inputs[1]),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": lambda inputs, attributes: torch.gt(inputs[0], inputs[1]),
    "GreaterOrEqual": lambda inputs, attributes: torch.ge(inputs[0], inputs[1]),
    "Less": lambda inputs, attributes: torch.lt(inputs[0], inputs[1]),
    "LessOrEqual": lambda inputs, attributes: torch.le(inputs[0], inputs[1]),
    "Log": lambda inputs, attributes: torch.log(inputs[0]),
    "Not": lambda inputs, attributes: torch.logical_not(inputs[0]),
    "Range": lambda inputs, attributes: torch.arange(*(input_.item() for input_ in inputs)),
    "Resize": _resize,
    "Shape": lambda inputs, attributes: torch.tensor(
        tuple(inputs[0].shape)[attributes.get("start", 0) : attributes.get("end")]
    ),
    "Slice": _slice,
    "Split": _split,
    "Where": lambda inputs, attributes: torch.where(inputs[0], inputs[1], inputs[2]),
}
_REFUSED: Mapping[str, Callable[[ir.Node], bool]] = {
    "Pad": lambda node: attribute(node, "mode", "constant") != "constant",
    "ConvTranspose": lambda node: "output_shape" in node.attributes,
    "BatchNormalization": lambda node: bool(attribute(node, "training_mode", 0)),
    "Dropout": lambda node: len(node.inputs) > 2,
}


def unsupported(nodes: Iterable[ir.Node]) -> list[str]:
    """The nodes that have no row, the first of each kind, each with the number of them."""
    names_by_kind: dict[str, list[str]] = {}
    for node in nodes:
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        refuse = _REFUSED.get(node.op_type)
        has_other = node.op_type != "Split" and any(
            value.uses() or value.is_graph_output() for value in node.outputs[1:]
        )
        if node.domain or node.op_type not in ROWS or (refuse is not None and refuse(node)) or has_other:
            names_by_kind.setdefault(kind, []).append(str(node.name))
    return [
        f"{kind} ('{names[0]}'{f' and {len(names) - 1} more' * (len(names) > 1)})"
        for kind, names in names_by_kind.items()
    ]


class OnnxNetwork(torch.nn.Module):
    """Computes what an ONNX network does. Call it with the inputs in their order, or by name; it returns the output, or
    a tuple of several. `choices` says how inputs of nodes are rounded, one rounding after the other.

    Parameters have the names of the constants, with '_' for '.'; `constants` says which is which. While gradients are
    computed, the share `unrounded` of the numbers of an activation, drawn with `chance`, is not rounded.
    """

    def __init__(self, model: ir.Model, choices: Mapping[Place, Sequence[Choice]] | None = None) -> None:
        super().__init__()
        missing = unsupported(model.graph)
        if missing:
            raise ModelError(f"the network has operators that torch is not taught here: {', '.join(missing)}")
        self._model, self._choices = model, dict(choices or {})
        self.unrounded = 0.0
        self.chance: torch.Generator | None = None
        self._quantizers: dict[tuple[Choice, tuple[int, ...], torch.device], Quantizer] = {}
        self.input_names = [str(value.name) for value in model.graph.inputs]
        self.output_names = [str(value.name) for value in model.graph.outputs]
        self.constants: dict[str, str] = {}  # the attribute of each constant, by its name in the file
        self._lists: dict[Place, torch.Tensor] = {}
        self._trained: set[str] = set()
        self._last_use: dict[int, list[str]] = {}  # set here, since no constant may take the name of an attribute
        self._steps = [(node, ROWS[node.op_type], _attributes_of(node)) for node in model.graph]
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                values = constant(value)
                if value is None or values is None:
                    continue
                if index in _LISTS.get(node.op_type, ()):
                    self._lists[str(node.name), index] = _tensor(values.reshape(-1))
                self._add(str(value.name), node, index, values)
        for value in model.graph.inputs:
            if value.const_value is not None:  # a default, for callers that do not give it
                self._register(str(value.name), _tensor(value.const_value.numpy()), is_trained=False)
        self._add_returned_constants()
        self._last_use = self._find_last_uses()

    def _add_returned_constants(self) -> None:
        for value in self._model.graph.outputs:
            values = constant(value)
            if values is not None and str(value.name) not in self.constants:
                self._register(str(value.name), _tensor(values), is_trained=False)

    def _add(self, name: str, node: ir.Node, index: int, values: Array) -> None:
        if name in self.constants:
            return
        is_float = values.dtype.kind == "f" or str(values.dtype) == "bfloat16"
        is_trained = is_float and values.size > 1 and (node.op_type, index) not in _STATISTICS
        self._register(name, _tensor(values), is_trained=is_trained)

    def _register(self, name: str, tensor: torch.Tensor, *, is_trained: bool) -> None:
        taken, key = set(self.constants.values()), f"c_{name.replace('.', '_')}" if hasattr(self, name) else name
        key = key.replace(".", "_") or "constant"
        while key in taken or hasattr(self, key):
            key += "_"
        self.constants[name] = key
        if is_trained:
            self._trained.add(name)
            self.register_parameter(key, torch.nn.Parameter(tensor))
        else:
            self.register_buffer(key, tensor, persistent=False)

    def _find_last_uses(self) -> dict[int, list[str]]:
        """The values that nothing reads after each node, so that they need not be kept."""
        last: dict[str, int] = {}
        for place, (node, _, _) in enumerate(self._steps):
            last |= {str(value.name): place for value in node.inputs if value is not None}
        last_uses: dict[int, list[str]] = {}
        for name, place in last.items():
            if name not in self.output_names and name not in self.constants:
                last_uses.setdefault(place, []).append(name)
        return last_uses

    def trained_constants(self) -> dict[str, torch.nn.Parameter]:
        """The parameters, by the names of their constants in the file."""
        return {name: getattr(self, self.constants[name]) for name in self.constants if name in self._trained}

    def constant_readers(self) -> list[tuple[str, int, str, Sequence[Choice]]]:
        """Every place where a node reads a constant: node, number of the input, constant, and how it is rounded."""
        uses = []
        for node, _, _ in self._steps:
            for index, value in enumerate(node.inputs):
                if value is not None and str(value.name) in self.constants:
                    place = (str(node.name), index)
                    uses.append((*place, str(value.name), self._choices.get(place, ())))
        return uses

    def has_coarse_blocks(self, bits: int) -> bool:
        """True if some tensor is rounded to a block format with elements of at most that many bits."""
        formats = {
            choice.quantizer.format
            for choices in self._choices.values()
            for choice in choices
            if isinstance(choice, BlockChoice)
        }
        return any(fmt.element.bits <= bits for fmt in formats)

    def sums(self) -> list[str]:
        """The sums of two computed tensors, by name: the places where the branches of residual blocks meet."""
        summed = []
        for node, _, _ in self._steps:
            computed = [value for value in node.inputs if value is not None and str(value.name) not in self.constants]
            if node.op_type == "Add" and len(computed) == 2:
                summed.append(str(node.outputs[0].name))
        return summed

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> Any:
        """Return the output, or a tuple of the outputs."""
        outputs = self.tensors(self._named(given, named), self.output_names)
        results = tuple(outputs[name] for name in self.output_names)
        return results[0] if len(results) == 1 else results

    def _named(self, given: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(given) > len(self.input_names):
            raise InvalidValueError(f"{len(given)} inputs: expected {len(self.input_names)}: {self.input_names}")
        inputs = {**dict(zip(self.input_names, given, strict=False)), **named}
        if not set(self.input_names) - set(self.constants) <= set(inputs) <= set(self.input_names):
            raise InvalidValueError(f"inputs {sorted(inputs)}: expected {self.input_names}")
        return inputs

    def tensors(self, inputs: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of these names, of outputs as they are returned."""
        values: dict[str, Any] = dict(inputs)
        read: dict[str, torch.Tensor] = {}
        seen = self._joined_constants()
        for place, (node, row, attributes) in enumerate(self._steps):
            name = str(node.name)
            try:
                results = row(
                    [self._read(value, (name, i), values, seen) for i, value in enumerate(node.inputs)], attributes
                )
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise ModelError(f"{node.op_type} '{name}': {error}") from error
            results = results if isinstance(results, tuple) else (results,)
            for value, result in zip(node.outputs, results, strict=False):
                values[str(value.name)] = result
                if value.name in wanted:
                    read[str(value.name)] = result
            for unused in self._last_use.get(place, ()):
                values.pop(unused, None)
        for index, value in enumerate(self._model.graph.outputs):
            if value.name in wanted:
                read[str(value.name)] = self._read(value, ("", index), {**values, **read}, seen)
        return read

    def _joined_constants(self) -> dict[tuple[str, Sequence[Choice]], torch.Tensor]:
        """On a GPU, the weights whose block scales are searched, rounded together: one by one, the search is thousands
        of small kernels. Blocks do not depend on each other, so the numbers are the same."""
        groups: dict[tuple[BlockQuantizer, int], list[tuple[str, Sequence[Choice]]]] = {}
        for *_, name, choices in self.constant_readers():
            x = getattr(self, self.constants[name])
            choice = choices[0] if len(choices) == 1 else None
            if x.device.type not in JOINED_ON or not isinstance(choice, BlockChoice) or x.dim() < 2:
                continue
            length, size = x.shape[choice.axis], choice.quantizer.format.block_size
            is_whole = length % min(size, length) == 0 and choice.quantizer.is_fixed and not choice.to_bfloat16_first
            key = choice.quantizer, min(size, length)
            if is_whole and choice.quantizer.scale_rule is ScaleRule.MSE and (name, choices) not in groups.get(key, []):
                groups.setdefault(key, []).append((name, choices))
        joined: dict[tuple[str, Sequence[Choice]], torch.Tensor] = {}
        for (quantizer, rows), members in groups.items():
            moved = [getattr(self, self.constants[name]).movedim(axis_of(choices), 0) for name, choices in members]
            lanes = [x.reshape(-1, rows, x[0].numel()).transpose(0, 1).reshape(rows, -1) for x in moved]
            whole = torch.cat(lanes, 1)
            together = BlockChoice(quantizer, 0)
            rounded = straight_through(whole, self.quantizer(together, whole))
            parts = torch.split(rounded, [x.shape[1] for x in lanes], 1)
            for (name, choices), x, part in zip(members, moved, parts, strict=True):
                back = part.reshape(rows, -1, x[0].numel()).transpose(0, 1).reshape(x.shape)
                joined[name, choices] = back.movedim(0, axis_of(choices)).contiguous()
        return joined

    def _read(
        self,
        value: ir.Value | None,
        place: Place,
        values: Mapping[str, Any],
        seen: dict[tuple[str, Sequence[Choice]], torch.Tensor],
    ) -> Any:
        if value is None:
            return None
        if place in self._lists:
            return self._lists[place]
        name = str(value.name)
        x = values[name] if name in values else getattr(self, self.constants[name])
        choices = self._choices.get(place)
        if not choices:
            return x
        if (name, choices) not in seen:
            rounded = x
            for choice in choices:
                rounded = straight_through(rounded, self.quantizer(choice, rounded))
            if self.unrounded and name not in self.constants and torch.is_grad_enabled():
                is_kept = torch.empty_like(x).bernoulli_(self.unrounded, generator=self.chance)
                rounded = torch.lerp(rounded, x, is_kept)
            seen[name, choices] = rounded
        return seen[name, choices]

    def quantizer(self, choice: Choice, x: torch.Tensor) -> Quantizer:
        """The quantizer of tensors of that shape, on their device."""
        key = (choice, tuple(x.shape), x.device)
        if key not in self._quantizers:
            self._quantizers[key] = quantizer_of(choice, tuple(x.shape), x.device)
        return self._quantizers[key]

    def save(self, path: str | Path) -> None:
        """Write the ONNX network with the parameters as they are now, whole or not at all."""
        copy = self._model.clone()
        for name, parameter in self.trained_constants().items():
            value = copy.graph.initializers[name]
            assert value.const_value is not None
            old = value.const_value
            array = parameter.detach().cpu().numpy().reshape(tuple(old.shape.numpy())).astype(old.dtype.numpy())
            value.const_value = ir.tensor(array, name=name)
        write_model(split(copy), Path(path), SaveOptions())


def axis_of(choices: Sequence[Choice]) -> int:
    """The axis of a single choice of blocks."""
    (choice,) = choices
    assert isinstance(choice, BlockChoice), choice
    return choice.axis


def choices_of(plan: QuantizationPlan) -> dict[Place, tuple[Choice, ...]]:
    """How inputs of nodes are rounded; what is quantized at run time stays as it is."""
    choices: dict[Place, tuple[Choice, ...]] = {}
    for entry in plan:
        several = [
            choice
            for choice in (entry.first, entry.choice)
            if choice is not None and not isinstance(choice, DynamicChoice)
        ]
        choices |= {(reader.node, reader.index): tuple(several) for reader in entry.readers if several}
    return choices


def _attributes_of(node: ir.Node) -> dict[str, Any]:
    return {**{name: attribute(node, name) for name in node.attributes}, "outputs": len(node.outputs)}


def _tensor(values: Array) -> torch.Tensor:
    if values.dtype.kind == "b":
        return torch.from_numpy(np.array(values))
    is_integer = values.dtype.kind in "iu"
    return torch.from_numpy(np.array(values, np.int64 if is_integer else np.float32))


def stacked(samples: Sequence[Sample], device: torch.device) -> Tensors:
    """The samples as one batch on the device, joined along the first axis."""
    tensors = {}
    for name in samples[0]:
        arrays = [np.asarray(sample[name]) for sample in samples]
        whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        tensors[name] = tensor_of(whole, device) if whole.dtype.kind == "f" else torch.tensor(whole, device=device)
    return tensors


@contextmanager
def tensor_float32(*, is_on: bool) -> Iterator[None]:
    """Compute products on a GPU in TF32, which holds numbers of up to 11 bits exactly, or in float32. torch's own
    default is TF32 for convolutions alone."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = is_on
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
