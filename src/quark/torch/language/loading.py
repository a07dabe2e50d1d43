"""Load a saved quantized language model into a float module of the same architecture.

The module computes what the saved one did, bit for bit. Everything in the folder is checked against the module before
it is used: names, types, shapes, finite scales, codes within their type. A tensor that has no place is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quark.decide.specs import AffineSpec, FloatSpec, LayerSpec, TensorSpec, is_measured
from quark.errors import ModelError, QuarkError, UnsupportedOptionError
from quark.plan import AffineChoice, Role
from quark.torch.language.activations import quantizer_of
from quark.torch.language.architecture import all_linears, find_architecture, with_linears
from quark.torch.language.branches import NAMES as BRANCHES
from quark.torch.language.branches import add_branches, branch_kinds
from quark.torch.language.checkpoint import Checkpoint
from quark.torch.language.file_configs import (
    READERS,
    FileTypes,
    LayerTypes,
)
from quark.torch.language.float8 import Float8Quantizer
from quark.torch.language.kv_cache import KEY, VALUE, CacheQuantizers, attach
from quark.torch.language.linear import QuantizedLinear, RoundedWeight
from quark.torch.language.pipeline import QuantizedState, layers_path
from quark.torch.language.weight_layouts import Kinds, QuarkLayout
from quark.torch.quantization.config.config import Config
from quark.torch.specs import Settings
from quark.torch.train.quantizers import AffineQuantizer

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | os.PathLike[str],
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
    multi_gpu: bool | str | None = False,
) -> nn.Module:
    """Put the numbers of a saved model into a float one of the same architecture, and return it in eval mode.

    `model_dir` is what `export_safetensors` wrote, in any layout, or a folder of AMD Quark. `model` may have its
    parameters on the meta device, as from `from_config`; it is changed in place. Without one, transformers makes it
    from the config.json of the folder, with `attn_implementation`, and with the folder's own code if
    `trust_remote_code`. `device` is where the result goes. Raises ModelError for a folder that does not belong to it.
    """
    if multi_device or multi_gpu:
        name = "multi_device" if multi_device else "multi_gpu"
        raise UnsupportedOptionError(f"{name}: a model is loaded to one device here; move parts of it afterwards")
    checkpoint = Checkpoint(model_dir)
    if model is None:
        model = _skeleton(model_dir, trust_remote_code, attn_implementation)
    config = checkpoint.config()
    if not config.has("quantization_config"):
        raise ModelError(f"'{model_dir}' is not quantized: its config.json has no quantization_config")
    quantization = config.mapping("quantization_config")
    method = quantization.text("quant_method", READERS)
    types = READERS[method](quantization, list(all_linears(model)))
    settings = _settings(types)
    architecture = find_architecture(model, layers_path(settings))
    transposed = {path for path, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    for index in range(architecture.count):
        with_linears(model.get_submodule(architecture.layer(index)))
    own = next(model.get_submodule(architecture.embedding).parameters())
    named = config.text("dtype") if config.has("dtype") else ""
    device = torch.device("cpu") if own.device.type == "meta" else own.device
    loader = _Loader(checkpoint, types, transposed, device, _DTYPES.get(named, own.dtype))
    for path, kind in types.layers.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(path, loader.linear(path, linear, kind))
    loader.cache(model)
    loader.rest(model, architecture.embedding, architecture.head)
    loader.check_all_used()
    model.quark = QuantizedState(architecture, settings, ())  # type: ignore[assignment]
    return (model if device is None else model.to(device)).eval().requires_grad_(False)


def _skeleton(folder: str | os.PathLike[str], trust_remote_code: bool, attention: str | None) -> nn.Module:
    """The model of a folder's config.json, with numbers that are replaced."""
    import transformers  # noqa: PLC0415 - heavy, and optional

    loader: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would look for a quantizer of its own
    options = {} if attention is None else {"attn_implementation": attention}
    model: nn.Module = loader.from_config(config, trust_remote_code=trust_remote_code, **options)
    return model


@dataclass(eq=False)
class _Loader:
    checkpoint: Checkpoint
    types: FileTypes
    transposed: set[str]
    device: torch.device
    dtype: torch.dtype
    used: set[str] = field(default_factory=set)

    def linear(self, path: str, linear: nn.Linear, types: LayerTypes) -> QuantizedLinear:
        shape = (linear.out_features, linear.in_features)
        stub = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        stub.weight = nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), False)
        if linear.bias is not None:
            stub.bias = nn.Parameter(self._tensors(path, {"bias": (None, shape[:1])})["bias"].to(self.device), False)
        try:
            made = QuantizedLinear(stub, types.weight, self._weight(path, types, shape))
        except ModelError as error:
            raise ModelError(f"'{path}' of '{self.checkpoint.folder}': {error}") from error
        except UnsupportedOptionError as error:
            raise ModelError(f"'{path}' of '{self.checkpoint.folder}' cannot be read: {error}") from error
        stored = {name: self.checkpoint.entries.get(f"{path}.{name}") for name in BRANCHES}
        there: Kinds = {name: (entry.dtype, entry.shape) for name, entry in stored.items() if entry is not None}
        if there:
            try:
                kinds = branch_kinds(there, linear.in_features, linear.out_features)
            except ModelError as error:
                raise ModelError(f"'{path}' of '{self.checkpoint.folder}': {error}") from error
            add_branches(made, self._tensors(path, kinds))
        made.input_quantizer = self._quantizer(f"{path}.input", types.activation)
        made.output_quantizer = self._quantizer(f"{path}.output", types.output)
        return made

    def _weight(self, path: str, types: LayerTypes, shape: tuple[int, int]) -> RoundedWeight:
        if types.weight is None:
            return RoundedWeight(self._tensors(path, {"weight": (None, shape)})["weight"])
        layout = self.types.layout
        kinds = layout.expected(types.weight, shape, types.activation is not None)
        weight = layout.weight(types.weight, shape, self._tensors(path, kinds))
        if not bool(torch.isfinite(weight.values).all()):
            raise ModelError("a weight is not finite")
        return weight

    def _quantizer(self, name: str, spec: TensorSpec | None) -> nn.Module | None:
        """The quantizer whose numbers are NAME_scale and NAME_zero_point."""
        if spec is None:
            return None
        if not is_measured(spec):
            return quantizer_of(spec, None, name).to(self.device)
        is_quark = isinstance(self.types.layout, QuarkLayout)
        shape = () if is_quark else (1,)
        path, _, last = name.rpartition(".")
        kinds: Kinds = {f"{last}_scale": (torch.float32, shape)}
        if isinstance(spec, AffineSpec) and (is_quark or not spec.is_symmetric):
            stored = torch.int32 if spec.integer.bits == 4 else getattr(torch, spec.format)
            kinds[f"{last}_zero_point"] = (stored if is_quark else torch.int8), shape
        tensors = self._tensors(path, kinds)
        scale = float(tensors[f"{last}_scale"].float())
        if not 0 < scale < float("inf"):
            raise ModelError(f"'{name}_scale' of '{self.checkpoint.folder}' is {scale}: expected a number above 0")
        if isinstance(spec, FloatSpec):
            return Float8Quantizer(name, spec, scale).to(self.device)
        zero_point = int(tensors.get(f"{last}_zero_point", torch.zeros(())))
        if not spec.integer.qmin <= zero_point <= spec.integer.qmax:
            raise ModelError(f"'{name}_zero_point' of '{self.checkpoint.folder}' is {zero_point}: no {spec.format}")
        choice = AffineChoice(spec.format, (scale,), (zero_point,))
        return AffineQuantizer(name, Role.ACTIVATION, choice, ()).to(self.device)

    def cache(self, model: nn.Module) -> None:
        """Put quantizers in front of the caches of attention modules."""
        by_attention: dict[str, dict[str, nn.Module]] = {}
        of_attention = self.types.layout.has_cache_scales
        for name, types in self.types.kv_cache.items():
            attention, _, projection = name.rpartition(".")
            if not types.is_post_rope:
                continue
            if projection not in (KEY, VALUE):
                raise ModelError(f"the cache of '{name}': expected projections called {KEY} and {VALUE}")
            stored = f"{attention}.{projection[0]}" if of_attention else f"{name}.output"
            quantizer = self._quantizer(stored, types.spec)
            assert quantizer is not None
            by_attention.setdefault(attention, {})[projection] = quantizer
        for path, quantizers in by_attention.items():
            attach(model.get_submodule(path), quantizers, self.device)

    def rest(self, model: nn.Module, embedding: str, head: str | None) -> None:
        """Load everything that is not quantized."""
        done: tuple[str, ...] = ()
        for path, module in list(model.named_modules()):
            if isinstance(module, (QuantizedLinear, CacheQuantizers)):
                done = (*done, f"{path}.")
            if f"{path}.".startswith(done):
                continue
            skipped = module._non_persistent_buffers_set
            buffers = {name: buffer for name, buffer in module._buffers.items() if name not in skipped}
            for name, value in {**module._parameters, **buffers}.items():
                if value is None:
                    continue
                full = f"{path}.{name}".lstrip(".")
                if path == head and name == "weight" and full not in self.checkpoint.entries:
                    continue
                is_transposed = path in self.transposed and name == "weight"
                shape = tuple(value.shape[::-1] if is_transposed else value.shape)
                kind = None if value.is_floating_point() else value.dtype
                tensor = self._tensors(path, {name: (kind, shape)})[name].to(self.device)
                tensor = tensor.T.contiguous() if is_transposed else tensor
                if name in module._parameters:
                    module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
                else:
                    module._buffers[name] = tensor
        if head is None or isinstance(model.get_submodule(head), QuantizedLinear):
            return
        if f"{head}.weight" not in self.checkpoint.entries:  # tied to the embedding
            weight = model.get_submodule(embedding).weight
            assert isinstance(weight, nn.Parameter)
            model.get_submodule(head).weight = weight

    def _tensors(self, path: str, kinds: Kinds) -> dict[str, torch.Tensor]:
        prefix = path or ""
        full = {name: f"{prefix}.{name}".lstrip(".") for name in kinds}
        for name, (dtype, shape) in kinds.items():
            self.checkpoint.check(full[name], dtype, shape)
        tensors = self.checkpoint.read(full.values())
        self.used.update(full.values())
        return {name: tensors[full_name] for name, full_name in full.items()}

    def check_all_used(self) -> None:
        strange = sorted(self.checkpoint.entries.keys() - self.used)
        if strange:
            raise ModelError(
                f"'{self.checkpoint.folder}' has {len(strange)} tensors that the model has no place for, such as "
                f"'{strange[0]}': it belongs to another model"
            )


def _settings(types: FileTypes) -> Settings:
    """The settings that the model was quantized by, if the file has them."""
    content: Mapping[str, Any] | None = types.settings
    if content is None:
        return Settings(LayerSpec(None, None))
    try:
        return Config.from_dict(content).settings()
    except (QuarkError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ModelError(f"quantization_config: field 'settings' cannot be read: {error}") from error
