"""Save a quantized language model as a folder that Hugging Face's loaders read.

    config.json               the model's configuration, with `quantization_config`
    model.safetensors         weights as codes with their scales; several files with an index, if they are large
    generation_config.json, tokenizer.json, ...

The files take their places together, at the end. What is stored is compared with what the model computes with before it
is written.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.decide.specs import AffineSpec, BlockSpec, TensorSpec
from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError, unknown_name
from quark.files.output import together, writing
from quark.text import get_logger
from quark.torch.language.architecture import Architecture, all_linears
from quark.torch.language.branches import branch_tensors
from quark.torch.language.checkpoint import (
    CONFIG,
    GENERATION,
    INDEX,
    WEIGHTS,
    companions_of,
    index_of,
    shard_name,
    write_bytes,
    write_json,
    write_shard,
)
from quark.torch.language.file_configs import (
    AWQ,
    COMPRESSED,
    FP8,
    QUARK,
    WRITERS,
    FileTypes,
    KvTypes,
    spec_of_quantizer,
    types_of,
)
from quark.torch.language.float8 import Float8Quantizer
from quark.torch.language.kv_cache import ATTRIBUTE, KEY, VALUE, CacheQuantizers
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.pipeline import QuantizedState, spec_of
from quark.torch.language.weight_layouts import (
    AwqLayout,
    CompressedLayout,
    Fp8Layout,
    QuarkLayout,
    Tensors,
    WeightLayout,
)
from quark.torch.specs import Settings
from quark.torch.train.quantizers import AffineQuantizer

_LOG = get_logger(__name__)
LAYOUTS = (QUARK, COMPRESSED, AWQ, FP8)
SHARD_BYTES = 4 << 30
_STALE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# relative to a step: weights of an algorithm may be computed in another order than codes times scales
_TOLERANCE = 1e-2


def layout_of(custom_mode: str, weight_format: str | None, pack_method: str) -> WeightLayout:
    """The layout that the arguments of `export_safetensors` name."""
    formats, methods = ("real_quantized", "fake_quantized"), ("reorder", "order")
    if weight_format is not None and weight_format not in formats:
        raise unknown_name("weight_format", weight_format, formats)
    if pack_method not in methods:
        raise unknown_name("pack_method", pack_method, methods)
    if custom_mode not in LAYOUTS:
        raise unknown_name("custom_mode", custom_mode, LAYOUTS)
    if custom_mode == QUARK:
        return QuarkLayout(pack_method == "reorder", weight_format != "fake_quantized")
    if weight_format == "fake_quantized":
        raise UnsupportedOptionError(f"weight_format 'fake_quantized' with custom_mode '{custom_mode}': it has codes")
    if custom_mode == COMPRESSED:
        return CompressedLayout()
    return AwqLayout(pack_method == "reorder") if custom_mode == AWQ else Fp8Layout()


def check_layout(model: nn.Module, architecture: Architecture, settings: Settings, layout: WeightLayout) -> None:
    """Raise if files of the layout cannot hold a linear layer that is to be quantized, before any is."""
    sizes = all_linears(model)
    for path, shape in sizes.items():
        spec = spec_of(settings, path) if architecture.has(path) else None
        if spec is None or spec.weight is None:
            continue
        if type(model.get_submodule(path)).__name__ == "Conv1D":
            refuse_transposed(path, layout)
        try:
            layout.expected(spec.weight, shape, spec.activation is not None)
        except UnsupportedOptionError as error:
            raise UnsupportedOptionError(f"'{path}': {error}") from error


def refuse_transposed(path: str, layout: WeightLayout) -> None:
    """Raise if a layout does not hold linear layers with weights [inputs, outputs]."""
    if type(layout) is not QuarkLayout:
        raise UnsupportedOptionError(
            f"'{path}' is a Conv1D, and {layout.name} quantizes torch.nn.Linear only; use the layout quark"
        )


def save_language_model(model: nn.Module, folder: str | os.PathLike[str], layout: WeightLayout) -> Path:
    """Write a model that `ModelQuantizer` quantized into the folder, which is created if necessary.

    Returns the path of config.json.
    """
    state = getattr(model, "quark", None)
    if not isinstance(state, QuantizedState):
        raise InvalidValueError(
            f"{type(model).__name__} is not quantized: hand it to ModelQuantizer.quantize_model first"
        )
    parts = Parts(model, state.architecture, layout)
    parts.warn()
    target = Path(folder)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    shards = list(parts.shards())
    with together(target / CONFIG):
        written = []
        for number, names in enumerate(shards):
            file = WEIGHTS if len(shards) == 1 else shard_name(number, len(shards))
            tensors = parts.tensors(names)
            write_shard(tensors, target / file)
            written.append((file, dict.fromkeys(tensors), _bytes(tensors)))
            del tensors
        if len(shards) > 1:
            write_json(index_of(written), target / INDEX)
        files = describe(model, parts.file_types(state.settings), parts.excluded, is_tied=parts.is_tied)
        source = getattr(model.config, "_name_or_path", None)
        for name, content in companions_of(source).items():
            write_bytes(content, target / name)
        for name, value in files.items():
            write_json(value, target / name)
    remove_stale(target, {INDEX, *(file for file, _, _ in written)} if len(shards) > 1 else {WEIGHTS})
    return target / CONFIG


def describe(model: nn.Module, types: FileTypes, excluded: Iterable[str], *, is_tied: bool) -> dict[str, Any]:
    """The content of generation_config.json and config.json by name."""
    config: Any = model.config
    content = {key: value for key, value in config.to_diff_dict().items() if key not in ("_name_or_path", "quark")}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    content["architectures"] = [type(model).__name__]
    content["tie_word_embeddings"] = is_tied
    content["quantization_config"] = WRITERS[type(types.layout)](types, excluded)
    if len(dtypes) == 1:
        content["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    files = {}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files[GENERATION] = generation.to_diff_dict()
    return {**files, CONFIG: content}


def remove_stale(folder: Path, kept: set[str]) -> None:
    """Remove weights that an earlier model left in the folder. Loaders would take `model.safetensors` first."""
    for path in folder.iterdir():
        if _STALE.fullmatch(path.name) and path.name not in kept and path.is_file():
            with writing(path):
                path.unlink()


@dataclass(eq=False)
class Parts:
    """The tensors of a quantized model by name. Parts of a model can be missing, as when it is streamed."""

    model: nn.Module
    architecture: Architecture
    layout: WeightLayout
    transposed: frozenset[str] = field(init=False)  # linear layers that have weights [inputs, outputs] in the model
    known: frozenset[str] = field(init=False)  # tensors of the float model

    def __post_init__(self) -> None:
        skeleton = skeleton_of(type(self.model), self.model.config)
        modules = skeleton.named_modules()
        self.transposed = frozenset(path for path, module in modules if type(module).__name__ == "Conv1D")
        self.known = frozenset(skeleton.state_dict())

    @property
    def is_tied(self) -> bool:
        """True if head and embedding are one parameter now."""
        parts = self.architecture
        if parts.head is None:
            return False
        head, embedding = (self.model.get_submodule(path).weight for path in (parts.head, parts.embedding))
        return head is embedding

    @property
    def excluded(self) -> list[str]:
        """Linear layers that stayed in float."""
        return [path for path, module in self.model.named_modules() if type(module) is nn.Linear]

    def warn(self) -> None:
        """Tell what a loader of the layout does otherwise."""
        for path, linear in self.quantized().items():
            is_wide = linear.weight.dtype is not torch.bfloat16
            if isinstance(self.layout, CompressedLayout) and isinstance(linear.spec, BlockSpec) and is_wide:
                _LOG.warning(
                    "'%s' is %s: compressed-tensors makes bfloat16 of MX weights when it loads them, so transformers "
                    "runs the file only as a bfloat16 model; convert the model with .bfloat16() before it is quantized",
                    *(path, linear.weight.dtype),
                )
                return

    def quantized(self) -> dict[str, QuantizedLinear]:
        """The quantized linear layers by name."""
        return {path: module for path, module in self.model.named_modules() if isinstance(module, QuantizedLinear)}

    def shards(self) -> list[list[str]]:
        """The paths of modules that own tensors, as many together as go into one file."""
        shards: list[list[str]] = []
        left = 0
        for path in self.owners():
            size = self._size(self.model.get_submodule(path))
            if size > left or not shards:
                shards.append([])
                left = SHARD_BYTES
            shards[-1].append(path)
            left -= size
        return shards

    def _size(self, module: nn.Module) -> int:
        """The bytes of a module in the file, about: scales of activations are not counted."""
        if not isinstance(module, QuantizedLinear) or module.spec is None:
            return _bytes(_own(module))
        kinds = self.layout.expected(module.spec, tuple(module.weight.shape), module.input_quantizer is not None)
        return sum(
            math.prod(shape) * (module.weight.dtype if kind is None else kind).itemsize
            for kind, shape in kinds.values()
        )

    def owners(self) -> Iterator[str]:
        """The paths of the modules whose tensors are stored."""
        done: tuple[str, ...] = ()
        for path, module in self.model.named_modules():
            if done and path.startswith(done):
                continue
            if isinstance(module, (QuantizedLinear, CacheQuantizers)):
                done = (*done, f"{path}.")
            if isinstance(module, (QuantizedLinear, CacheQuantizers)) or _own(module):
                yield path

    def tensors(self, paths: Iterable[str]) -> Tensors:
        """The tensors of these modules, by their names in the file."""
        made: Tensors = {}
        for path in paths:
            module = self.model.get_submodule(path)
            if isinstance(module, QuantizedLinear):
                made |= {f"{path}.{name}": value for name, value in self.linear_tensors(path, module).items()}
            elif isinstance(module, CacheQuantizers):
                made |= self.cache_tensors(path.removesuffix(f".{ATTRIBUTE}"), module)
            else:
                made |= self._plain_tensors(path, module)
        return made

    def _plain_tensors(self, path: str, module: nn.Module) -> Tensors:
        made = {}
        for name, value in _own(module).items():
            full = f"{path}.{name}".lstrip(".")
            if path == self.architecture.head and name == "weight" and self.is_tied:
                continue
            if full not in self.known:
                raise UnsupportedOptionError(
                    f"'{full}' is not in {type(self.model).__name__} before it is quantized, so a loader would ignore "
                    "it: an algorithm has added it; leave that algorithm out"
                )
            plain = value.detach().cpu()
            made[full] = plain.T if path in self.transposed and name == "weight" else plain
        return made

    def linear_tensors(self, path: str, linear: QuantizedLinear) -> Tensors:
        """The tensors of a quantized linear layer by their names in it."""
        branches = branch_tensors(path, linear)
        if branches and type(self.layout) is not QuarkLayout:
            raise UnsupportedOptionError(
                f"'{path}' has turned inputs or a low-rank branch, which files of {self.layout.name} do not hold here; "
                "use custom_mode='quark', or rotations that are folded into weights"
            )
        if path in self.transposed:
            refuse_transposed(path, self.layout)
        made: Tensors = {}
        has_activations = linear.input_quantizer is not None
        if linear.spec is None:
            made["weight"] = linear.weight.detach().cpu()
        else:
            kinds = self.layout.expected(linear.spec, tuple(linear.weight.shape), has_activations)
            made |= {name: tensor.contiguous() for name, tensor in self.layout.tensors(linear).items()}
            assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
                name: shape for name, (_, shape) in kinds.items()
            }
            self._compare(path, linear, linear.spec, made)
        if linear.bias is not None:
            made["bias"] = linear.bias.detach().cpu()
        made |= branches
        for place, quantizer in (("input", linear.input_quantizer), ("output", linear.output_quantizer)):
            if quantizer is not None:
                made |= {f"{place}_{name}": value for name, value in self._scale_tensors(quantizer).items()}
        return made

    def _compare(self, path: str, linear: QuantizedLinear, spec: TensorSpec, made: Tensors) -> None:
        """Raise unless the tensors stand for the weight that the model computes with."""
        weight = linear.weight.detach().cpu()
        again = self.layout.weight(spec, tuple(weight.shape), made).values.to(weight.dtype)
        if torch.equal(again, weight):
            return
        error = (again.float() - weight.float()).abs().amax()
        has_step = isinstance(spec, AffineSpec) and linear.weight_scale is not None
        step = linear.weight_scale.abs().amin() if has_step else 0  # type: ignore[union-attr]
        if not bool(error <= _TOLERANCE * step):
            raise ModelError(
                f"the weight of '{path}' is not on the grid of {spec.format}, by up to {float(error):.3g}: it was "
                "changed after it was quantized; quantize the model again"
            )

    def cache_tensors(self, attention: str, cache: CacheQuantizers) -> Tensors:
        """The scales of keys and values by their names in the file."""
        made: Tensors = {}
        if "forward" in vars(self.model.get_submodule(attention)):  # the rotation R3 replaces it
            raise UnsupportedOptionError(
                f"'{attention}' rotates queries and keys at inference, and its cache is quantized: files do not hold "
                "that rotation; use r3=False, or leave the cache in float"
            )
        for projection, quantizer in cache.quantizers.items():
            letter = {KEY: "k", VALUE: "v"}[projection]
            of_attention = self.layout.has_cache_scales
            prefix = f"{attention}.{letter}" if of_attention else f"{attention}.{projection}.output"
            made |= {f"{prefix}_{name}": value for name, value in self._scale_tensors(quantizer).items()}
        return made

    def _scale_tensors(self, quantizer: nn.Module) -> Tensors:
        """Scale and zero point of a quantizer with fixed ones."""
        is_quark = isinstance(self.layout, QuarkLayout)
        shape = () if is_quark else (1,)
        if isinstance(quantizer, Float8Quantizer):
            return {} if quantizer.scale is None else {"scale": quantizer.scale.cpu().reshape(shape)}
        if not isinstance(quantizer, AffineQuantizer):
            return {}
        made = {"scale": quantizer.scale.cpu().reshape(shape)}
        fmt, zero_point = quantizer.format, quantizer.zero_point.cpu().reshape(shape)
        if is_quark:
            made["zero_point"] = zero_point.to(torch.int32 if fmt.bits == 4 else getattr(torch, fmt.name))
        else:
            moved = zero_point.to(torch.int16) - (0 if fmt.signed else 1 << (fmt.bits - 1))
            made |= {"zero_point": moved.to(torch.int8)} if bool(moved.any()) else {}
        return made

    def file_types(self, settings: Settings) -> FileTypes:
        """The types that the file declares."""
        layers = {path: types_of(linear) for path, linear in self.quantized().items()}
        cached = {}
        for path, module in self.model.named_modules():
            if isinstance(module, CacheQuantizers):
                attention = path.removesuffix(f".{ATTRIBUTE}")
                for projection, quantizer in module.quantizers.items():
                    cached[f"{attention}.{projection}"] = KvTypes(spec_of_quantizer(quantizer), is_post_rope=True)
        if settings.kv_cache is not None and not settings.kv_cache.is_post_rope:
            cached = {
                path: KvTypes(types.output, is_post_rope=False)
                for path, types in layers.items()
                if types.output is not None and path.endswith((KEY, VALUE))
            }
        has_branches = any(
            linear.rotation is not None or linear.low_rank is not None for linear in self.quantized().values()
        )
        return FileTypes(self.layout, layers, cached, settings.config, has_branches)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module itself that a file has."""
    tensors: dict[str, torch.Tensor] = {name: value for name, value in module._parameters.items() if value is not None}
    skipped = module._non_persistent_buffers_set
    tensors |= {name: value for name, value in module._buffers.items() if value is not None and name not in skipped}
    return tensors


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def skeleton_of(kind: type[Any], config: Any) -> nn.Module:
    """A model of that class and configuration without numbers: parameters have shapes only, buffers are there."""
    with parameters_on_meta():
        made = kind(copy.deepcopy(config))
    assert isinstance(made, nn.Module)
    return made


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block, the parameters of new modules take no memory. Buffers, such as rotary frequencies, are made as
    usual."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
