"""Write a causal language model, quantized or float, as ONNX.

    input_ids [batch, sequence], attention_mask [batch, sequence]    ->    logits [batch, sequence, vocabulary]

and with a cache, `past_key_values.0.key` and so on behind the inputs and `present.0.key` behind the outputs; the mask
then also covers the past. Batch and lengths are free.

The modules are traced as they are. While that happens, linear layers mark what they read, their weight and what they
return by taps (`translate`), so that the plan follows from the graph as it does for other networks, and `insert` writes
the quantizers. What no operator of ONNX can say, a scale for each token that is found at run time, is traced as the
arithmetic that it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from quark.decide.specs import FloatSpec
from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.files.output import scratch_folder, writing
from quark.formats.affine import dequantize_affine, integer_format
from quark.onnx.insert import InsertOptions, NBitsOptions, insert
from quark.onnx.large_tensors import LARGE_MODEL_BYTES
from quark.onnx.load import load
from quark.plan import AffineChoice, Choice, QuantizationPlan, Role, TensorChoice
from quark.text import get_logger
from quark.torch.export.deployable import ExportError, Inputs, quiet
from quark.torch.export.exported_graph import choose_opset, planned_graph
from quark.torch.export.parity import Array, least_sqnr_db, numpy_of
from quark.torch.export.plan_of_taps import rename, rename_sizes
from quark.torch.export.plan_of_taps import values_of as values_in
from quark.torch.export.translate import Tap, first_line, tap_operator, translate_program
from quark.torch.language.architecture import find_architecture
from quark.torch.language.float8 import Float8Quantizer, codes_of, values_of
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.streams import arguments_of
from quark.torch.train.quantizers import DynamicQuantizer, Quantizer

IDS, MASK = "input_ids", "attention_mask"
# Exact rewrites. Constants are not folded: a head that shares its weight with the embedding would get a copy of it.
_REWRITES = frozenset({"remove_identity", "fuse_gelu"})
_TRACED_LENGTH, _TRACED_PAST = 5, 3  # any sizes that torch does not take for constants, as it does 0 and 1
_LEAST_BLOCK = 16  # the smallest block of MatMulNBits
_NBITS = (2, 4, 8)
_OPSET_OF_FLOAT8 = 19
_OPSET_OF_OUTPUT_TYPES = 21  # the opset from which QuantizeLinear has them

_LOG = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class LanguageGraph:
    """The exported form of a model: the graph without quantizers, the plan in its names, and the values that can be
    compared, by the names of their tensors in torch."""

    graph: ir.Model
    plan: QuantizationPlan
    values: Mapping[str, ir.Value]


class LanguageModel:
    """A language model as a function of tensors, on the CPU and in a type that ONNX Runtime computes in. The given
    model is not changed; it is copied if it has to be moved or converted."""

    def __init__(self, model: nn.Module, *, has_cache: bool = False) -> None:
        self.model = _deployable(model)
        self.has_cache = has_cache
        state = getattr(self.model, "quark", None)
        architecture = find_architecture(self.model, state.architecture.layers if state is not None else "")
        self.layers = architecture.count
        self.tied = architecture.head if architecture.is_tied else None
        self.takes_positions = "position_ids" in inspect.signature(type(self.model).forward).parameters
        self.least_sqnr_db = least_sqnr_db(self.model)
        self.outputs = ["logits", *self._cache_names("present")]

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs, in order."""
        return [IDS, MASK, *self._cache_names("past_key_values")]

    def _cache_names(self, prefix: str) -> list[str]:
        if not self.has_cache:
            return []
        return [f"{prefix}.{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value")]

    def example(self, given: Any) -> Inputs:
        """Token ids and mask from an example; with a cache, the past is empty."""
        if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(x, torch.Tensor) for x in given):
            given = dict(zip((IDS, MASK), given, strict=True))
        arguments = arguments_of(given, "input_args")
        unknown = [name for name in arguments if name not in (IDS, MASK)]
        if unknown or IDS not in arguments:
            raise InvalidValueError(
                f"input_args with {', '.join(arguments) or 'nothing'}: expected {IDS}, and {MASK} where some of it is "
                "padding"
            )
        ids = arguments[IDS].detach().cpu().long().contiguous()
        mask = arguments.get(MASK)
        mask = torch.ones_like(ids) if mask is None else mask.detach().cpu().long().contiguous()
        if mask.shape != ids.shape:
            raise InvalidValueError(
                f"input_args: {MASK} is {tuple(mask.shape)} and {IDS} {tuple(ids.shape)}: expected the same"
            )
        return ids, mask, *self._past(len(ids), 0)

    def batches(self, example: Inputs) -> list[Inputs]:
        """The inputs for a comparison: the example, and another batch and length, with padding in front. With a cache,
        the second one continues the first."""
        ids, mask = example[:2]
        if not self.has_cache:
            other = torch.cat([ids[:1], ids[-1:], ids[:1]])[:, : max(1, ids.shape[1] - 1)].contiguous()
            padded = torch.ones_like(other)
            padded[0, : other.shape[1] // 3] = 0
            return [(ids, mask), (other, padded)]
        cache = [torch.from_numpy(array) for array in self.run(example)[1:]]
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return [example, (ids[:, -1:].contiguous(), longer, *cache)]

    def traced_example(self, example: Inputs) -> Inputs:
        """Inputs for tracing, with sizes that are not special to torch."""
        ids = example[0].reshape(-1)
        ids = ids.repeat(-(-2 * _TRACED_LENGTH // len(ids)))[: 2 * _TRACED_LENGTH].reshape(2, _TRACED_LENGTH).clone()
        past = _TRACED_PAST if self.has_cache else 0
        mask = torch.ones((2, _TRACED_LENGTH + past), dtype=torch.long)
        return ids, mask, *self._past(2, past)

    def _past(self, batch: int, length: int) -> list[torch.Tensor]:
        """An empty cache, or one of zeros."""
        if not self.has_cache:
            return []
        with torch.no_grad():
            cache = self._call(torch.zeros((1, 1), dtype=torch.long), torch.ones((1, 1), dtype=torch.long))[1:]
        return [tensor.new_zeros((batch, tensor.shape[1], length, tensor.shape[3])) for tensor in cache]

    def _call(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *past: torch.Tensor) -> Inputs:
        """Logits, and the cache as tensors."""
        forward = type(self.model).forward.__get__(self.model)
        arguments: dict[str, Any] = {IDS: input_ids, MASK: attention_mask, "use_cache": self.has_cache}
        if self.has_cache and self.takes_positions:  # padding in front is not counted, as in `generate`
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            arguments["position_ids"] = positions[:, -input_ids.shape[1] :]
        if past:
            arguments["past_key_values"] = _cache_of(past)
        result = forward(**arguments)
        if not self.has_cache:
            return (result.logits,)
        layers = getattr(result.past_key_values, "layers", None)
        if layers is None:
            raise UnsupportedOptionError(
                f"has_cache: the cache of {type(self.model).__name__} is a {type(result.past_key_values).__name__}; "
                "expected one with layers of keys and values, as transformers has from 4.56 on"
            )
        return result.logits, *(value for layer in layers for value in (layer.keys, layer.values))

    # ---- what a file is compared with ----

    def run(self, inputs: Inputs) -> list[Array]:
        """The outputs of the model."""
        with torch.no_grad(), _eager(self.model):
            return [numpy_of(tensor) for tensor in self._call(*inputs)]

    def record(self, inputs: Inputs, wanted: Collection[str]) -> Mapping[str, Array]:
        """Record the inputs and results of linear layers, and the outputs of the model."""
        tensors: dict[str, Array] = {}

        def keep(name: str, value: torch.Tensor, quantizer: nn.Module | None) -> torch.Tensor:
            if name in wanted:
                tensors[name] = numpy_of(value).copy()  # some models add to what a layer returned
            return value if quantizer is None else _plain_forward(quantizer, value)

        with self._visiting(keep, lambda _name, linear: linear.weight):
            outputs = self.run(inputs)
        return {**tensors, **dict(zip(self.outputs, outputs, strict=True))}

    def layer_of(self, tensor: str) -> str:
        """The linear layer that reads or returns a tensor."""
        return tensor.rpartition(".")[0] if tensor.endswith((".input", ".output")) else tensor

    # ---- tracing ----

    def program(self, example: Inputs) -> tuple[torch.export.ExportedProgram, tuple[Tap, ...]]:
        """The model as a program in which batch and lengths are free, with taps instead of quantizers."""
        choices = dict(self._choices())  # before tracing, which hides numbers
        float8 = {
            f"{path}.weight": (codes_of(layer.weight, layer.weight_scale, layer.spec.format), layer.weight_scale)
            for path, layer in self._float8_layers()
        }
        taps: list[Tap] = []
        computed: list[tuple[torch.Tensor, nn.Module, torch.Tensor]] = []

        def tap(name: str, value: torch.Tensor, role: Role, choice: Choice | None) -> torch.Tensor:
            taps.append(Tap(len(taps), name, role, choice))
            result: torch.Tensor = tap_operator()(value, len(taps) - 1)
            return result

        def activation(name: str, value: torch.Tensor, quantizer: nn.Module | None) -> torch.Tensor:
            if quantizer is None or choices.get(name) is not None:
                return tap(name, value, Role.ACTIVATION, choices.get(name))
            for source, known, result in computed:  # layers that read the same tensor share the arithmetic
                if source is value and _is_same_arithmetic(known, quantizer):
                    return result
            seen = tap(name, value, Role.ACTIVATION, None)
            if isinstance(quantizer, DynamicQuantizer):
                result = dynamic_values(seen, quantizer)
            else:
                result = _plain_forward(quantizer, seen)
            computed.append((value, quantizer, result))
            return result

        def weight(name: str, linear: nn.Linear | QuantizedLinear) -> torch.Tensor:
            if name in float8:
                return values_of(*float8[name]).to(linear.weight.dtype)
            if choices.get(name) is None and name == f"{self.tied}.weight":
                return linear.weight  # the embedding's; it stays one constant
            return tap(name, linear.weight, Role.WEIGHT, choices.get(name))

        inputs = self.traced_example(example)
        free = torch.export.Dim.DYNAMIC
        axes: list[Any] = [{0: free, 1: free}, {0: free, 1: free}]
        axes += [tuple({0: free, 2: free} for _ in inputs[2:])] if self.has_cache else []
        model = self.model
        try:
            with self._visiting(activation, weight), _eager(model), quiet(), torch.no_grad():
                model.forward = self._call
                try:
                    program = torch.export.export(model, inputs, dynamic_shapes=tuple(axes), strict=False)
                finally:
                    del model.forward
        except Exception as error:  # torch.export's own classes are not public
            raise ExportError(
                f"torch.export does not take {type(model).__name__} with a free batch and length: {first_line(error)}"
            ) from error
        return program, tuple(taps)

    def _choices(self) -> Iterator[tuple[str, Choice | None]]:
        """The choices of the quantized tensors, by name; None for tensors that are traced as arithmetic."""
        float8 = {path for path, _ in self._float8_layers()}
        for path, linear in self.model.named_modules():
            if isinstance(linear, QuantizedLinear):
                weight = None if path in float8 else linear.weight_choice()
                yield f"{path}.weight", weight
                for name, quantizer in _quantizers(path, linear):
                    is_read = name.endswith(".input")
                    if not _is_arithmetic(quantizer, weight if is_read else None):
                        yield name, _choice_of(quantizer, name)
        for path, quantizer in self._other_quantizers():
            if not _is_arithmetic(quantizer, None):
                yield path, _choice_of(quantizer, path)

    def _float8_layers(self) -> Iterator[tuple[str, Any]]:
        """Linear layers with weights of 8-bit floats."""
        for path, linear in self.model.named_modules():
            spec = linear.spec if isinstance(linear, QuantizedLinear) else None
            if isinstance(spec, FloatSpec) and spec.is_eight_bits:
                yield path, linear

    def _other_quantizers(self) -> Iterator[tuple[str, Quantizer]]:
        """Quantizers outside of linear layers: those of what enters a cache."""
        own = {
            id(quantizer)
            for path, linear in self.model.named_modules()
            if isinstance(linear, QuantizedLinear)
            for _, quantizer in _quantizers(path, linear)
        }
        for path, module in self.model.named_modules():
            if isinstance(module, Quantizer) and id(module) not in own:
                yield path, module

    @property
    def has_float8(self) -> bool:
        """True if the file needs types of 8-bit floats."""
        return any(True for _ in self._float8_layers()) or any(
            isinstance(module, Float8Quantizer) for module in self.model.modules()
        )

    @contextmanager
    def _visiting(self, activation: _Activation, weight: _Weight) -> Iterator[None]:
        """Within the block, linear layers show what they read, their weights and what they return."""
        layers = [
            (path, module)
            for path, module in self.model.named_modules()
            if isinstance(module, (nn.Linear, QuantizedLinear))
        ]
        others = list(self._other_quantizers())
        for path, layer in layers:
            layer.forward = _visited(path, layer, activation, weight)  # type: ignore[method-assign]
        for path, quantizer in others:
            quantizer.forward = partial(_visited_quantizer, path, quantizer, activation)
        try:
            yield
        finally:
            for _, module in (*layers, *others):
                del module.forward


def _visited_quantizer(path: str, quantizer: nn.Module, activation: _Activation, x: torch.Tensor) -> torch.Tensor:
    return activation(path, x, quantizer)


_Activation = Callable[[str, torch.Tensor, nn.Module | None], torch.Tensor]
_Weight = Callable[[str, Any], torch.Tensor]


def _visited(path: str, linear: Any, activation: _Activation, weight: _Weight) -> Callable[..., torch.Tensor]:
    """The forward of a linear layer, by the two functions."""
    quantizers = [getattr(linear, f"{name}_quantizer", None) for name in ("input", "output")]

    def forward(x: torch.Tensor) -> torch.Tensor:
        rotation, low_rank = getattr(linear, "rotation", None), getattr(linear, "low_rank", None)
        x = x if rotation is None else rotation(x)
        seen = activation(f"{path}.input", x, quantizers[0])
        result = nn.functional.linear(seen, weight(f"{path}.weight", linear), linear.bias)
        if low_rank is not None:
            down, up = low_rank
            result = result + nn.functional.linear(nn.functional.linear(x, down), up)
        return activation(f"{path}.output", result, quantizers[1])

    return forward


def _quantizers(path: str, linear: QuantizedLinear) -> Iterator[tuple[str, nn.Module]]:
    """The quantizers of a layer, by the names of their tensors."""
    for name, quantizer in (("input", linear.input_quantizer), ("output", linear.output_quantizer)):
        if quantizer is not None:
            yield f"{path}.{name}", quantizer


def _choice_of(quantizer: nn.Module, name: str) -> Choice:
    if not isinstance(quantizer, Quantizer):
        raise UnsupportedOptionError(
            f"tensor '{name}' is quantized by a {type(quantizer).__name__}, which cannot be written as ONNX; save the "
            "model as safetensors instead"
        )
    return quantizer.choice()


def _is_arithmetic(quantizer: nn.Module, weight: Choice | None) -> bool:
    """True for what no operator of ONNX says. `weight` is that of the layer that reads the tensor: with integers of 8
    bits, DynamicQuantizeLinear and MatMulInteger compute the product."""
    if not isinstance(quantizer, DynamicQuantizer):
        return isinstance(quantizer, Float8Quantizer)
    is_standard = quantizer.format.name == "uint8" and not quantizer.is_symmetric and not quantizer.is_per_row
    fits = isinstance(weight, AffineChoice) and weight.group_size is None and integer_format(weight.format).bits == 8
    return not (is_standard and fits)


def _is_same_arithmetic(first: nn.Module, second: nn.Module) -> bool:
    if isinstance(first, DynamicQuantizer) and isinstance(second, DynamicQuantizer):
        names = ("format", "is_symmetric", "is_per_row")
        return all(getattr(first, name) == getattr(second, name) for name in names)
    if isinstance(first, Float8Quantizer) and isinstance(second, Float8Quantizer):
        return first.scale is None and second.scale is None and first.spec == second.spec
    return False


def _plain_forward(quantizer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute the quantizer's result, although its forward may be replaced."""
    result: torch.Tensor = type(quantizer).forward(quantizer, x)
    return result


@contextmanager
def language_graph(model: LanguageModel, example: Inputs, opset: int | None) -> Iterator[LanguageGraph]:
    """The model as a graph with its plan. Within the block, weights may be read from temporary files."""
    program, taps = model.program(example)
    known = {tap.tensor: tap.choice for tap in taps if tap.choice is not None}
    choices = [  # choices that standard operators have to express
        choice
        for tensor, choice in known.items()
        if not (tensor.endswith(".weight") and is_packed(choice) and tensor[: -len("weight")] + "input" not in known)
    ]
    is_half = any(parameter.dtype is torch.float16 for parameter in model.model.parameters())
    version = choose_opset(choices, is_half=is_half, wanted=opset)
    version = max(version, _OPSET_OF_FLOAT8) if model.has_float8 and opset is None else version
    translated = translate_program(program, version)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters())
    with scratch_folder() as folder:
        # a message in memory would be one more copy of the weights, and its size is limited
        if size > LARGE_MODEL_BYTES:
            path = Path(folder) / "float.onnx"
            with writing(path), quiet():
                translated.save(path, external_data=True)
            graph = load(path).model
        else:
            graph = load(translated.model_proto).model
        del translated, program
        graph, plan, values = planned_graph(graph, taps, _REWRITES, {})
        if version >= _OPSET_OF_OUTPUT_TYPES:
            plan = replace(plan, tensors=tuple(map(_unsigned, plan)))
        named = {value.name: value for value in values_in(graph)}
        _name_ports(graph, model)
        plan = replace(plan, tensors=tuple(replace(entry, tensor=str(named[entry.tensor].name)) for entry in plan))
        yield LanguageGraph(graph, plan, values)


def _unsigned(tensor: TensorChoice) -> TensorChoice:
    """An activation in uint8 instead of int8, with the same numbers. ONNX Runtime 1.31 refuses files
    of opset 21 in which an int8 DequantizeLinear stands before a Reshape: it inserts a QuantizeLinear of its own there,
    with a type that it takes for uint8."""
    choice = tensor.choice
    if tensor.role is not Role.ACTIVATION or not isinstance(choice, AffineChoice) or choice.format != "int8":
        return tensor
    shifted = tuple(code + 128 for code in choice.zero_point)
    return replace(tensor, choice=replace(choice, format="uint8", zero_point=shifted))


def insert_language(graph: ir.Model, plan: QuantizationPlan) -> None:
    """Carry the plan out: products of which only the weight is quantized, to integers that it takes, become
    MatMulNBits, all else QuantizeLinear, DequantizeLinear and our own operators."""
    others = {reader.node for entry in plan if entry.role is Role.ACTIVATION for reader in entry.readers}
    packed = tuple(
        entry
        for entry in plan
        if entry.role is Role.WEIGHT and is_packed(entry.choice) and not {r.node for r in entry.readers} & others
    )
    if packed:
        insert(graph, replace(plan, tensors=packed), InsertOptions(matmul_nbits=NBitsOptions()))
    rest = tuple(entry for entry in plan if entry not in packed)
    insert(graph, replace(plan, tensors=rest), InsertOptions(has_casts=True))


def is_packed(choice: Choice) -> bool:
    """True for weights that MatMulNBits holds."""
    if not isinstance(choice, AffineChoice) or choice.axis is None:
        return False
    size = choice.group_size
    has_blocks = size is None or (size >= _LEAST_BLOCK and size & (size - 1) == 0)
    return integer_format(choice.format).bits in _NBITS and has_blocks


def _name_ports(graph: ir.Model, model: LanguageModel) -> None:
    """Name inputs, outputs and free sizes."""
    for values, names in ((list(graph.graph.inputs), model.inputs), (list(graph.graph.outputs), model.outputs)):
        for value, name in zip(values, names, strict=True):
            rename(graph, value, name)
    sizes: dict[str, str] = {}
    for value in graph.graph.inputs:
        axes = {0: "batch", 2: "past_sequence"} if value.name not in (IDS, MASK) else {0: "batch", 1: "sequence"}
        if value.name == MASK and model.has_cache:
            axes[1] = "total_sequence"
        for axis, name in axes.items():
            size = None if value.shape is None else value.shape[axis]
            if isinstance(size, ir.SymbolicDim) and size.value:
                sizes.setdefault(size.value, name)
    rename_sizes(graph, sizes)


def dynamic_values(x: torch.Tensor, quantizer: DynamicQuantizer) -> torch.Tensor:
    """The result of a DynamicQuantizer, in operators that can be traced.

    >>> from quark.plan import DynamicChoice
    >>> quantizer = DynamicQuantizer("x", Role.ACTIVATION, DynamicChoice("int8"), is_symmetric=True, is_per_row=True)
    >>> x = torch.tensor([[1.0, -3.0, 0.7], [0.0, 0.0, 0.0]])
    >>> bool((dynamic_values(x, quantizer) == quantizer(x)).all())
    True
    """
    fmt, tiny = quantizer.format, torch.finfo(torch.float32).tiny
    axes: dict[str, Any] = {"dim": -1, "keepdim": True} if quantizer.is_per_row else {}
    wide = x.float()
    if quantizer.is_symmetric:
        qmin = -fmt.qmax if fmt.signed else fmt.qmin
        scale = wide.abs().amax(**axes) * 2 / (fmt.qmax - qmin)
        scale = torch.where(scale < tiny, 1.0, scale)
        middle = round((qmin + fmt.qmax) / 2)
        codes = ((wide / scale).round() + middle).clamp(fmt.qmin, fmt.qmax)
        return ((codes - middle) * scale).to(x.dtype)
    low, high = wide.amin(**axes).clamp(max=0.0), wide.amax(**axes).clamp(min=0.0)
    scale = (high - low) / (fmt.qmax - fmt.qmin)
    is_narrow = scale < tiny
    scale = torch.where(is_narrow, 1.0, scale)
    zero_point = torch.where(is_narrow, 0.0, (fmt.qmin - low / scale).round().clamp(fmt.qmin, fmt.qmax))
    codes = ((wide / scale).round() + zero_point).clamp(fmt.qmin, fmt.qmax)
    return ((codes - zero_point) * scale).to(x.dtype)


def _deployable(model: nn.Module) -> nn.Module:
    """The model in eval mode on the CPU, in float32 if it is bfloat16 or float64; a copy if that changes anything."""
    tensors = [*model.parameters(), *model.buffers()]
    others = sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float64)})
    if not others and not model.training and all(tensor.device.type == "cpu" for tensor in tensors):
        return model
    model = copy.deepcopy(model).cpu().eval()
    if not others:
        return model
    _LOG.info("%s weights are exported as float32, which ONNX Runtime computes in", " and ".join(others))
    model = model.float()
    for linear in model.modules():
        parameters = linear.parameters_of_weight() if isinstance(linear, QuantizedLinear) else None
        if isinstance(linear, QuantizedLinear) and parameters is not None:
            exact = dequantize_affine(linear.codes(), parameters)
            linear.weight = nn.Parameter(torch.from_numpy(np.asarray(exact, np.float32)), requires_grad=False)
    return model


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Within the block, attention is computed by products and Softmax."""
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before in (None, "eager") or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def _cache_of(past: Sequence[torch.Tensor]) -> Any:
    from transformers import DynamicCache  # noqa: PLC0415 - only models of that package come here

    return DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
