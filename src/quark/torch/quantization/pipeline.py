"""The pipeline: capture, optimize, equalize, place, observe, choose, refine, insert.

`ModelQuantizer` runs it by a configuration. Users train the result before they call `freeze`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram

from quark.decide import AffineSpec, place, tensors_to_measure
from quark.decide.specs import DynamicSpec, FloatSpec
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.features.mixed_precision.plan import MixedPlan
from quark.features.order import call, features_missing
from quark.files.foreign import REPORT, read_json
from quark.plan import QuantizationPlan, Role
from quark.text import get_logger
from quark.torch.capture import Batch, Batches, DynamicShapes, capture, signature_of
from quark.torch.deciding import Decision, Work
from quark.torch.freeze import freeze
from quark.torch.graph import CALL
from quark.torch.insert import insert
from quark.torch.language.architecture import is_language_model
from quark.torch.language.pipeline import QuantizedState, quantize_language_model
from quark.torch.language.saving import layout_of
from quark.torch.language.streaming import quantize_checkpoint
from quark.torch.observe import UNKNOWN, FirstBatch, observe, recalibrate
from quark.torch.optimize import optimize
from quark.torch.origin import Origin, data_facts, source_facts, state_digest
from quark.torch.planned import with_plan
from quark.torch.runtime import RuntimeNetwork, simulate_runtime
from quark.torch.specs import Settings
from quark.torch.train.networks import QuantizedNetwork, is_derived_bias, with_state
from quark.torch.view import view_of

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config

_LOG = get_logger(__name__)
_RANDOM_BATCHES = 4


def quantize_network(
    model: nn.Module | ExportedProgram,
    loader: Iterable[Any] | None,
    settings: Settings,
    plan: QuantizationPlan | MixedPlan | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> QuantizedNetwork:
    """Quantize a model by the settings; with a plan, its layers get the types of the plan. The model is not changed."""
    _refuse_what_needs_modules(settings)
    is_empty = _is_empty(loader)
    batches = None if is_empty else _batches(model, loader, settings)
    unkept = [name for name, value in (("plan", plan), ("dynamic_shapes", dynamic_shapes)) if value is not None]

    def example() -> Batch:
        if batches is None:
            raise InvalidValueError(
                f"{type(model).__name__} has to be traced with an example: hand calibration data to quantize_model, or "
                "quark.torch.export_for_training(model, example_inputs) in the place of the model"
            )
        return next(iter(batches))

    if dynamic_shapes is None and batches is not None:
        dynamic_shapes = batches.dynamic_shapes
    network = capture(model, example, dynamic_shapes, None if batches is None else batches.call)
    source = source_facts(model)  # after checking that it is a model whose values can be read
    optimize(network)
    settings = settings if plan is None else with_plan(network, settings, plan)
    work = Work(network, None if loader is None else batches, settings)  # random numbers do not replace data
    algorithms = call("torch", "before_calibration", work)
    placement = place(view_of(network), settings.choose)
    wanted = tensors_to_measure(placement)
    fixed = [tensor for tensor, spec in wanted if not (isinstance(spec, AffineSpec) and spec.learning is not None)]
    if fixed and is_empty:
        raise InvalidValueError(
            f"the calibration data is empty, and {len(fixed)} activations have scales that are measured, such as "
            f"'{fixed[0]}': expected at least one batch; only scales that are learned (TQTObserver, LSQObserver) can "
            "start from the first batch of training"
        )
    if wanted and batches is None and not is_empty:
        raise InvalidValueError(
            f"{len(wanted)} activations have static scales, such as '{wanted[0][0]}', and there is no data: "
            "pass a loader to quantize_model, use is_dynamic=True, or quantize weights alone"
        )
    ranges = dict.fromkeys(wanted, UNKNOWN) if is_empty else observe(network, wanted, batches or ())
    decision = Decision(network, work.batches, settings, placement, ranges, starts_late=is_empty)
    algorithms = (*algorithms, *call("torch", "after_choosing", decision), *decision.positions)
    insert(network, decision.decisions, FirstBatch if is_empty else None, ranges)
    chosen, final = decision.decisions.chosen, decision.decisions.plan
    state = {
        "plan": final,
        "algorithms": algorithms,
        "config": settings.config,
        "operations": decision.operations,
        "specs": {entry.quantizer: entry.request.spec for entry in chosen if entry.request.role is Role.ACTIVATION},
        "repeated": tuple(entry for entry in chosen if entry.is_repeated),
        "derived_biases": tuple(entry for entry in final if is_derived_bias(entry.role, entry.choice)),
    }
    quantized: QuantizedNetwork = with_state(network, QuantizedNetwork, state)
    facts, state = data_facts(batches, loader, settings.seed), quantized.state_dict()
    quantized.origin = Origin(source, settings.config, facts, state_digest(state), tuple(unkept))
    return quantized.eval()


def _refuse_what_needs_modules(settings: Settings) -> None:
    """Raise for what is only carried out on language models."""
    missing = features_missing("torch", settings)
    if missing:
        raise UnsupportedOptionError(
            f"algo_config asks for {missing[0].replace('_', ' ')}, which is carried out on causal language models of "
            "Hugging Face (a list of layers between an embedding and a head), and this model is quantized on its "
            "graph; leave it out, or export the model to ONNX and use quark.onnx"
        )
    layers = [settings.specs, *settings.by_type.values(), *settings.by_name.values()]
    specs = [spec for layer in layers if layer is not None for spec in (layer.activation, layer.output)]
    if any(isinstance(spec, DynamicSpec) and spec.is_per_row for spec in specs):
        raise UnsupportedOptionError(
            "is_dynamic with per_channel, a scale for each token, is carried out on causal language models of Hugging "
            "Face, and this model is quantized on its graph, where a tensor has one scale at run time; use per_tensor"
        )
    specs += [spec for layer in layers if layer is not None for spec in (layer.weight, layer.bias)]
    if any(isinstance(spec, FloatSpec) and spec.is_dynamic for spec in specs):
        raise UnsupportedOptionError(
            "fp8 with is_dynamic, a scale found at run time, is carried out on causal language models of Hugging Face, "
            "and this model is quantized on its graph; use is_dynamic=False, or blocks (OCP_MXFP8E4M3Spec)"
        )
    if settings.kv_cache is not None:
        raise UnsupportedOptionError(
            "kv_cache_quant_config: only causal language models of Hugging Face have a cache of keys and values, and "
            "this model is quantized on its graph; leave it out"
        )


def _is_empty(loader: Any) -> bool:
    """True if the loader has a length and that is 0; generators have none."""
    return isinstance(loader, Sized) and len(loader) == 0


def _batches(model: nn.Module | ExportedProgram, loader: Iterable[Any] | None, settings: Settings) -> Batches | None:
    if loader is not None:
        return Batches(loader, signature_of(model))
    if not isinstance(model, ExportedProgram) or model.example_inputs is None:
        return None
    warnings.warn(
        "no calibration data: ranges are found from random numbers and may not fit real data; pass a loader to "
        "quantize_model",
        stacklevel=4,
    )
    generator = torch.Generator().manual_seed(settings.seed)

    def random_like(tensor: Any) -> Any:
        is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return torch.randn(tensor.shape, generator=generator) if is_float else tensor

    random = [tuple(map(random_like, model.example_inputs[0])) for _ in range(_RANDOM_BATCHES)]
    return Batches(random, signature_of(model))


@dataclass(frozen=True)
class RuntimeOptions:
    """Kernels that AMD Quark's `freeze` can put in the place of linear layers. Ours stay float products of rounded
    numbers in torch, so `freeze` refuses it; integer kernels come with the exported file."""

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False


class ModelQuantizer:
    """Quantizes models by one configuration. `multi_device` makes no difference: layers follow each other on one
    device, so that a model does not have to be spread."""

    def __init__(self, config: Config, multi_device: bool = False) -> None:
        if multi_device:
            _LOG.info("multi_device makes no difference: layers follow each other on one device")
        if not hasattr(config, "settings"):
            raise UnsupportedTypeError(
                f"ModelQuantizer: expected a Config of quark.torch.quantization.config.config, got "
                f"{type(config).__name__}; Config(QuantizationConfig(...)) is one"
            )
        self.config = config
        self._settings = config.settings()

    def quantize_model(
        self,
        model: nn.Module | ExportedProgram,
        dataloader: Iterable[Any] | None = None,
        plan: QuantizationPlan | MixedPlan | str | os.PathLike[str] | None = None,
        *,
        dynamic_shapes: DynamicShapes | None = None,
    ) -> Any:
        """Return the model with quantizers in it, calibrated and in eval mode. It trains like any other module.

        `model` is an exported program, its module, or a plain module, which is traced with the first batch; it is not
        changed. `dataloader` yields tensors, tuples with labels last, or dictionaries, as tokenizers of Hugging Face
        make them; the result is called as the model is. Without one, only types that need no ranges can be used, or
        random numbers are taken for an exported program, with a warning. With an empty one, `[]`, steps and thresholds
        that are learned start from the first batch that the result sees. `plan` is a plan that quark.onnx made for the
        ONNX file of the same model, or a file that holds one: layers get the types decided there, and everything else
        comes from the configuration. `dynamic_shapes` is that of `export_for_training`; without it the batch is free,
        as are the length of token ids and every axis whose size differs between batches.

        A causal language model of Hugging Face is quantized layer by layer instead, in place, and returned as what it
        is: see `quark.torch.language`. Its data are token ids, or dictionaries of what the model takes.
        """
        if is_language_model(model):
            if plan is not None or dynamic_shapes is not None:
                name = "plan" if plan is not None else "dynamic_shapes"
                raise UnsupportedOptionError(f"{name}: language models are quantized by the configuration alone")
            return quantize_language_model(model, dataloader, self._settings_for_language())
        known = read_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
        return quantize_network(model, dataloader, self._settings, known, dynamic_shapes)

    def direct_quantize_checkpoint(  # noqa: PLR0913 - AMD Quark's arguments, and three more by keyword
        self,
        pretrained_model_path: str | os.PathLike[str],
        save_path: str | os.PathLike[str],
        keep_excluded_layers_as_original_model_state: bool = False,
        *legacy_device_args: str | torch.device,
        weight_converters: list[Any] | None = None,
        device: str | torch.device | list[str | torch.device] | None = None,
        presharded_weights: dict[str, int] | None = None,
        dataloader: Iterable[Any] | None = None,
        custom_mode: str = "quark",
        pack_method: str = "reorder",
    ) -> None:
        """Quantize a language model from a folder of safetensors to another one, layer by layer.

        The model is never in memory as a whole: only two of its layers, its embedding, and the hidden states of the
        data are. `dataloader` has token ids, as for `quantize_model`; without it only types that need no ranges can be
        used. `custom_mode` and `pack_method` are those of `export_safetensors`. A run that was killed goes on where it
        stopped, if it is started again with the same arguments, and gives the same bytes: a folder beside the output,
        SAVE_PATH.quark-work, keeps what is finished.

        Layers that are left out are always written as they are in the source, which
        `keep_excluded_layers_as_original_model_state` asks for. `device` is one device, the CPU where None.
        """
        devices = list(device) if isinstance(device, (list, tuple)) else [*legacy_device_args, device]
        given = [chosen for chosen in devices if chosen is not None]
        if len(given) > 1:
            raise UnsupportedOptionError(f"device {given}: layers follow each other on one device; give one")
        for name, value in (("weight_converters", weight_converters), ("presharded_weights", presharded_weights)):
            if value is not None:
                raise UnsupportedOptionError(f"{name}: weights are read as transformers names them; leave it out")
        if not isinstance(keep_excluded_layers_as_original_model_state, bool):
            raise UnsupportedTypeError("keep_excluded_layers_as_original_model_state: expected True or False")
        layout = layout_of(custom_mode, None, pack_method)
        place = given[0] if given else "cpu"
        settings = self._settings_for_language()
        quantize_checkpoint(pretrained_model_path, save_path, settings, dataloader, layout, place)

    def _settings_for_language(self) -> Settings:
        if self._settings.ends is not None:
            raise UnsupportedOptionError(
                "keep_first_last: language models are quantized module by module, without a graph that says which come "
                "first and last; name them in layer_quant_config, or leave the head in float by exclude"
            )
        # the default of an omitted algo_config is determined on graphs
        return replace(self._settings, features={}) if self.config.algo_config is None else self._settings

    @staticmethod
    def recalibrate(model: QuantizedNetwork, dataloader: Iterable[Any]) -> int:
        """Find the fixed scales of activations again, from what a network that trains computes now; return how many.

        Scales that are learned, or found at run time, stay as they are, and so do those of weights. Training moves
        activations away from the ranges of the float network: call it between epochs, or once before freezing.
        """
        if not isinstance(model, QuantizedNetwork):
            raise UnsupportedTypeError(
                f"recalibrate: expected what quantize_model returned for a module, got {type(model).__name__}"
            )
        call = model.meta.get(CALL)
        signature = signature_of(model) if call is None else call.signature
        specs = {name: spec for name, spec in model.specs.items() if isinstance(spec, AffineSpec)}
        return recalibrate(model, specs, Batches(dataloader, signature))

    @staticmethod
    def freeze(model: Any, quantize: bool | None = None, runtime_options: RuntimeOptions | None = None) -> Any:
        """Return the network in eval mode with fixed numbers, ready to be exported. Those of a language model are fixed
        already. What `simulate_runtime` returned stays simulated. `quantize=False` and `runtime_options` are refused:
        weights are always rounded, and no kernels are chosen here."""
        if quantize is False or runtime_options is not None:
            name = "runtime_options" if runtime_options is not None else "quantize"
            raise UnsupportedOptionError(f"{name}: freezing rounds the weights and chooses no kernels; leave it out")
        if isinstance(model, RuntimeNetwork):
            return simulate_runtime(freeze(model.network))
        return model if isinstance(getattr(model, "quark", None), QuantizedState) else freeze(model)


def read_plan(path: str | os.PathLike[str]) -> QuantizationPlan | MixedPlan:
    """Read a plan from a JSON file: one of mixed precision, one of all tensors, or the report that quark.onnx wrote
    beside a quantized file, which holds the latter."""
    label = f"plan '{os.fspath(path)}'"
    content = read_json(path, label, REPORT)
    content = content if isinstance(content, dict) else {}
    plan = content.get("plan")
    inner = plan if isinstance(plan, dict) else content
    if "layers" in inner:
        return MixedPlan.from_dict(inner, label)
    if "tensors" in inner:
        return QuantizationPlan.from_dict(inner, label)
    raise InvalidValueError(
        f"{label}: expected a plan (with 'tensors' or 'layers') or the report of a quantized ONNX file"
    )
