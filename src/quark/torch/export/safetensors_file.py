"""The quantized state of a frozen network: `model.safetensors`, and `quark_network.json` that describes it.

    model.safetensors    parameters as codes, packed bits or floats; all other state as it is
    quark_network.json   version, how each parameter is stored, the plan, the configuration it was quantized by

A network of the same architecture that loads it returns the same outputs, bit for bit. A file is data: names, types,
shapes and sizes are checked against the network before anything is used, and nothing in it is executed. A quantized
parameter is stored in the bits of its format:

    codes      integers of 8 bits and more, in their own type; scale and zero point beside them
               E4M3 and E5M2 in torch's float8 types, with their scale
    packed     integers of fewer bits, and blocks with their scales, as `quark.formats.packing` has them; for NVFP4 the
               tensor scale too
    float      float16 and bfloat16 numbers, and any number that none of the others restores exactly

The loaded parameter goes through a quantizer again, which must return the same numbers. Some block formats do not: a
block whose largest number was rounded up to the next power of two would get a larger scale, and one whose scale was
rounded up to a coarse subnormal E4M3 number a smaller one. Such numbers are restored a little smaller or larger, by
less than rounding undoes. If even that does not help, float numbers are stored.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn

import quark
from quark.errors import (
    InvalidValueError,
    MissingDependencyError,
    ModelError,
    QuarkError,
    UnsupportedOptionError,
    UnsupportedTypeError,
)
from quark.files.foreign import REPORT, Fields, read_json
from quark.formats.affine import code_dtype, dequantize_affine, quantize_affine
from quark.formats.arrays import array_kind
from quark.formats.packing import PackedArray, pack, unpack
from quark.formats.quantize import quantize_dequantize
from quark.onnx.save import complete, write_text, writing
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice, QuantizationPlan
from quark.rounded import float_scale, parameters_of, rounded
from quark.torch.export.deployable import frozen
from quark.torch.graph import attribute_of, module_of
from quark.torch.language.architecture import is_language_model
from quark.torch.language.checkpoint import INDEX
from quark.torch.language.float8 import TORCH_TYPES, codes_of, values_of
from quark.torch.language.saving import layout_of, save_language_model
from quark.torch.language.weight_layouts import QuarkLayout
from quark.torch.train.networks import FrozenNetwork, with_state
from quark.torch.train.quantizers import BlockFakeQuantizer, Quantizer

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]

WEIGHTS, CONFIG = "model.safetensors", "quark_network.json"  # config.json is the name of Hugging Face for another file
FORMER_CONFIG = "config.json"
VERSION = 1
SCALE, ZERO_POINT, BLOCK_SCALES, TENSOR_SCALE = "scale", "zero_point", "block_scales", "tensor_scale"
_NEARBY = tuple(
    np.float32(value) for value in (1 - 2.0**-12, 1.0625, 1.125, 1.1875, 1.24)
)  # factors that may round back


@dataclass(frozen=True)
class Stored:
    """How a parameter is stored: `kind` is codes, packed or float; `parts` are the tensors beside the first one."""

    kind: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> Stored:
        """Read an entry of the description."""
        kind, dtype = fields.text("kind", ("codes", "packed", "float")), fields.text("dtype")
        if not dtype.isidentifier() or not isinstance(getattr(torch, dtype, None), torch.dtype):
            fields.refuse("dtype", "a type of torch")
        return cls(kind, fields.text("format"), fields.shape("shape"), dtype, fields.texts("parts"))


def export_safetensors(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
    *,
    has_codes: bool = True,
    names: tuple[str, str] = (WEIGHTS, CONFIG),
) -> tuple[Path, Path]:
    """Write a quantized model into the folder, which is created if necessary; return the paths of weights and config.

    A causal language model is written as a folder of Hugging Face: `custom_mode` is "quark", the layout of AMD Quark,
    or "compressed-tensors", which transformers and vLLM read. `weight_format` "fake_quantized" stores float numbers
    instead of codes, and `pack_method` says how eight codes of 4 bits lie in a word: "reorder" as AWQ kernels take
    them, or "order". "awq" is the layout of AutoAWQ, for uint4 in groups, and "fp8" that of vLLM's FP8 with a scale for
    each tensor. `quark.torch.import_model_from_safetensors` loads all of them.

    Of other networks it is the state of a frozen one. One that still trains is frozen first, in a copy. With
    "fake_quantized", or without `has_codes`, quantized parameters are written as the float numbers that their codes
    stand for. `names` are those of the two files.
    """
    layout = layout_of(custom_mode, weight_format, pack_method)
    if is_language_model(model):
        config_file = save_language_model(model, output_dir, layout)
        single = config_file.parent / WEIGHTS
        return (single if single.exists() else config_file.parent / INDEX), config_file
    if not isinstance(layout, QuarkLayout):
        raise UnsupportedOptionError(f"custom_mode '{custom_mode}': only language models have that layout; use 'quark'")
    folder, has_codes = output_dir, has_codes and layout.has_codes
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependencyError("safetensors is not installed: pip install safetensors") from error
    network = frozen(model)
    if not isinstance(network, FrozenNetwork):
        raise UnsupportedTypeError("model: expected a quantized network, got a float one; torch.save writes its state")
    target = Path(folder)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    choices = parameter_choices(network)
    described: dict[str, Any] = {}
    tensors: Tensors = {}
    for name, value in network.state_dict().items():
        choice = choices.get(name)
        stored, parts = store(name, value, choice)
        if choice is not None and not has_codes:
            stored, parts = store(name, restore(name, stored, parts, choice).to(value.dtype), None)
        described[name] = {**vars(stored), "shape": list(stored.shape), "parts": list(stored.parts)}
        tensors |= parts
    content = {
        "quark_version": quark.__version__,
        "version": VERSION,
        "tensors": described,
        "plan": json.loads(network.plan.to_json()),
        "config": dict(network.configuration),
    }
    text = json.dumps(content, indent=1, default=str)
    weights, config = (target / name for name in names)
    with complete(weights) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_text(text, config)
    return weights, config


def export_gguf(
    model: nn.Module, output_dir: str | os.PathLike[str], model_type: str, tokenizer_path: str | os.PathLike[str]
) -> NoReturn:
    """Refuse to write a GGUF file. The function is here since scripts import it for the case that somebody asks."""
    raise UnsupportedOptionError(
        "GGUF files are not written; use export_safetensors with weight_format='fake_quantized', and "
        "convert_hf_to_gguf.py of llama.cpp"
    )


def load_safetensors(network: FrozenNetwork, folder: str | os.PathLike[str]) -> FrozenNetwork:
    """Return a copy of the network with the state from the folder. A ModelError names what does not fit."""
    own, former = Path(folder) / CONFIG, Path(folder) / FORMER_CONFIG
    is_former = former.exists() and not own.exists()  # written by versions up to 1.0
    return load_state(network, Path(folder) / WEIGHTS, former if is_former else own)


def load_state(network: FrozenNetwork, weights: Path, config_file: Path) -> FrozenNetwork:
    """The same from two files of any names."""
    from safetensors import SafetensorError, safe_open

    path = config_file
    label = f"'{path}' (export_safetensors writes it)"
    content = Fields(read_json(path, label, REPORT, ModelError), label, error=ModelError)
    if content.value("version") != VERSION:
        raise ModelError(f"'{path}': expected the description of a quantized state of version {VERSION}")
    try:
        plan = QuantizationPlan.from_dict(content.value("plan"), f"'{path}', plan")
    except InvalidValueError as error:
        raise ModelError(str(error)) from error
    _check_plan(network, plan)
    entries = content.mapping("tensors")
    described = {name: Stored.from_fields(entries.mapping(name)) for name in entries}
    state = network.state_dict()
    missing, strange = sorted(state.keys() - described.keys()), sorted(described.keys() - state.keys())
    if missing or strange:
        parts = [f"misses {', '.join(missing[:3])}"] if missing else []
        parts += [f"has {', '.join(strange[:3])}, which the network does not have"] if strange else []
        raise ModelError(f"the file does not belong to this network: it {' and '.join(parts)}")
    for name, stored in described.items():
        own = state[name]
        if stored.shape != tuple(own.shape) or f"torch.{stored.dtype}" != str(own.dtype):
            raise ModelError(
                f"'{name}' is {stored.dtype} of shape {stored.shape} in the file, and {own.dtype} of shape "
                f"{tuple(own.shape)} in the network"
            )
    path = weights
    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            wanted = set(described) | {f"{name}.{part}" for name, stored in described.items() for part in stored.parts}
            if there != wanted:
                raise ModelError(
                    f"'{path.name}' and {config_file.name} do not belong together: "
                    f"{', '.join(sorted(there ^ wanted)[:3])}"
                )
            tensors = {name: file.get_tensor(name) for name in sorted(wanted)}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read '{path}': {error}") from error
    here = parameter_choices(network)
    choices = {entry.tensor: entry.choice for entry in plan if entry.tensor in here}
    loaded = {name: restore(name, stored, tensors, choices.get(name)) for name, stored in described.items()}
    config = dict(content.mapping("config").content)
    result = copy.deepcopy(network)
    result.load_state_dict(loaded)
    read = {(entry.tensor, _kind(entry.choice)): entry.choice for entry in plan}
    for node in result.graph.nodes:
        quantizer = module_of(result, node)
        if isinstance(quantizer, BlockFakeQuantizer):
            source = node.all_input_nodes[0]
            tensor = str(source.target if source.op == "get_attr" else source.name)
            scaled = read[tensor, _kind(quantizer.choice())]
            assert isinstance(scaled, BlockChoice), tensor
            quantizer.assign(scaled)
    facts = {"plan": plan, "config": config, "algorithms": network.algorithms}
    made: FrozenNetwork = with_state(result, FrozenNetwork, facts)
    return made.eval().requires_grad_(False)


def parameter_choices(network: fx.GraphModule) -> dict[str, Choice]:
    """Return how each parameter of a frozen network is quantized, without those that two quantizers treat
    differently."""
    choices: dict[str, Choice] = {}
    disputed: set[str] = set()
    for node in network.graph.nodes:
        module = module_of(network, node)
        source = node.args[0] if node.args else None
        if not isinstance(module, Quantizer) or attribute_of(network, source) is None:
            continue
        assert isinstance(source, fx.Node)
        name, choice = str(source.target), module.choice()
        if choices.setdefault(name, choice) != choice or any(user is not node for user in source.users):
            disputed.add(name)
    return {name: choice for name, choice in choices.items() if name not in disputed}


def _check_plan(network: FrozenNetwork, plan: QuantizationPlan) -> None:
    """Raise unless the file quantizes the same tensors in the same formats; numbers may differ."""
    here, there = _kinds(network.plan), _kinds(plan)

    def words(kinds: list[Any] | None) -> str:
        return " and ".join(str(kind[0] if isinstance(kind, tuple) else kind) for kind in kinds) if kinds else "nothing"

    for tensor in sorted(here.keys() | there.keys()):
        if here.get(tensor) != there.get(tensor):
            raise ModelError(
                f"tensor '{tensor}' is quantized to {words(there.get(tensor))} in the file, and to "
                f"{words(here.get(tensor))} in the network: quantize the network by the configuration of the file"
            )


def _kinds(plan: QuantizationPlan) -> dict[str, list[Any]]:
    kinds: dict[str, list[Any]] = {}
    for entry in plan:
        kinds.setdefault(entry.tensor, []).append(_kind(entry.choice))
    return kinds


def _kind(choice: Choice) -> Any:
    """The choice without its numbers."""
    if isinstance(choice, AffineChoice):
        return str(choice), choice.axis
    if isinstance(choice, FloatChoice):
        return choice.format, choice.is_scaled, choice.axis
    if isinstance(choice, BlockChoice) and choice.quantizer.tensor_scale is not None:
        return replace(choice, quantizer=replace(choice.quantizer, tensor_scale=0.0))
    return choice


# ---- one parameter ----
def store(name: str, values: torch.Tensor, choice: Choice | None) -> tuple[Stored, Tensors]:
    """Return how a parameter is stored, and the tensors to write, the first under its own name."""
    dtype = str(values.dtype).removeprefix("torch.")
    plain = Stored("float", dtype, tuple(values.shape), dtype), {name: values.detach().cpu().contiguous()}
    if choice is None or values.dtype is not torch.float32:
        return plain
    array = np.ascontiguousarray(values.detach().cpu().numpy())
    if isinstance(choice, AffineChoice):
        parameters = parameters_of(choice, array.shape)
        codes = np.asarray(quantize_affine(array, parameters))
        is_packed = parameters.format.bits < 8
        tensors = {
            name: torch.from_numpy(pack(codes.astype(np.float32), parameters.format).codes if is_packed else codes),
            f"{name}.{SCALE}": torch.from_numpy(np.asarray(parameters.scale).copy()),
            f"{name}.{ZERO_POINT}": torch.from_numpy(np.asarray(parameters.zero_point)),
        }
        kind = "packed" if is_packed else "codes"
        stored = Stored(kind, choice.format, array.shape, "float32", (SCALE, ZERO_POINT))
    elif isinstance(choice, BlockChoice) and choice.quantizer.is_fixed:
        quantizer = choice.quantizer
        packed = pack(
            quantize_dequantize(array, "bfloat16") if choice.to_bfloat16_first else array,
            quantizer.format,
            choice.axis if array.ndim > 1 else 0,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
            tensor_scale=quantizer.tensor_scale,
        )
        parts = {BLOCK_SCALES: torch.from_numpy(packed.scales)}
        if packed.tensor_scale is not None:
            parts[TENSOR_SCALE] = torch.tensor(packed.tensor_scale)
        tensors = {name: torch.from_numpy(packed.codes), **{f"{name}.{part}": held for part, held in parts.items()}}
        stored = Stored("packed", choice.format, array.shape, "float32", tuple(parts))
    elif isinstance(choice, FloatChoice) and choice.is_scaled:
        scale = torch.from_numpy(float_scale(choice, array.ndim))
        tensors = {name: codes_of(torch.from_numpy(array), scale, choice.format), f"{name}.{SCALE}": scale.reshape(-1)}
        stored = Stored("codes", choice.format, array.shape, "float32", (SCALE,))
    elif isinstance(choice, FloatChoice):
        tensors = {name: torch.from_numpy(rounded(array, choice)).to(getattr(torch, choice.format))}
        stored = Stored("float", choice.format, array.shape, "float32")
    else:
        return plain
    again = rounded(restore(name, stored, tensors, choice).numpy(), choice)
    is_exact = np.array_equal(again, rounded(array, choice), equal_nan=True)
    return (stored, tensors) if is_exact else plain


def restore(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: Choice | None) -> torch.Tensor:
    """Return the numbers that were stored. A ModelError names a tensor that is not as the file describes it."""
    if stored.kind == "float":
        plain = tensors[name]
        if tuple(plain.shape) != stored.shape:
            raise ModelError(f"tensor '{name}' of the file has the shape {tuple(plain.shape)}, expected {stored.shape}")
        return plain.to(getattr(torch, stored.dtype))
    try:
        if isinstance(choice, BlockChoice):
            array = _decode_blocks(name, stored, tensors, choice)
        elif isinstance(choice, AffineChoice):
            array = _decode_integers(name, stored, tensors, choice)
        elif isinstance(choice, FloatChoice) and choice.is_scaled and stored.kind == "codes":
            array = _decode_float8(name, stored, tensors, choice)
        else:
            raise ModelError(f"it is stored as {stored.kind}, and the network has {choice} there")
        return torch.from_numpy(array).reshape(stored.shape)
    except KeyError as error:
        raise ModelError(f"tensor '{name}' of the file has no part {error}") from error
    except QuarkError as error:
        raise ModelError(f"tensor '{name}' of the file: {error}") from error


def _check_part(name: str, part: str, tensors: Mapping[str, torch.Tensor], expected: Any) -> None:
    """Raise unless a tensor beside the codes has the numbers of the plan."""
    if not np.array_equal(tensors[f"{name}.{part}"].numpy(), expected):
        raise ModelError(f"its {part} is not that of the plan")


def _decode_integers(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: AffineChoice) -> Array:
    parameters = parameters_of(choice, stored.shape)
    codes = tensors[name].numpy()
    _check_part(name, SCALE, tensors, parameters.scale)
    _check_part(name, ZERO_POINT, tensors, parameters.zero_point)
    dtype = code_dtype(array_kind(codes), parameters.format)
    if stored.kind == "packed":
        axis = max(len(stored.shape) - 1, 0)
        empty = np.zeros(0, np.uint8)
        numbers = unpack(PackedArray(codes, empty, parameters.format, stored.shape, axis, np.dtype("f4")))
        codes = np.asarray(numbers).astype(dtype)
    elif tuple(codes.shape) != stored.shape or codes.dtype != dtype:
        raise ModelError(f"{codes.dtype} codes of shape {tuple(codes.shape)}, expected {choice} of {stored.shape}")
    return np.asarray(dequantize_affine(codes, parameters))


def _decode_float8(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: FloatChoice) -> Array:
    codes, scale = tensors[name], float_scale(choice, len(stored.shape))
    _check_part(name, SCALE, tensors, scale.reshape(-1))
    if codes.dtype is not TORCH_TYPES[choice.format] or tuple(codes.shape) != stored.shape:
        raise ModelError(f"{codes.dtype} of shape {tuple(codes.shape)}, expected {choice} of {stored.shape}")
    return values_of(codes, torch.from_numpy(scale)).numpy()


def _decode_blocks(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: BlockChoice) -> Array:
    """Return numbers that the quantizer rounds to the stored ones; the module's docstring says why they may differ."""
    scales = tensors[f"{name}.{BLOCK_SCALES}"].numpy()
    axis = choice.axis % len(stored.shape) if len(stored.shape) > 1 else 0
    if choice.format != stored.format:
        raise ModelError(f"it is stored as {stored.format}, and the network has {choice.format} there")
    fmt, tensor_scale = choice.quantizer.format, choice.quantizer.tensor_scale
    if tensor_scale is not None:
        _check_part(name, TENSOR_SCALE, tensors, np.float32(tensor_scale))
    packed = PackedArray(tensors[name].numpy(), scales, fmt, stored.shape, axis, np.dtype("f4"), tensor_scale)
    values = np.asarray(unpack(packed))
    decoded = values
    for factor in _NEARBY:
        is_moved = np.moveaxis(rounded(decoded, choice) != values, axis, -1)
        if not is_moved.any():
            break
        starts = np.arange(0, is_moved.shape[-1], fmt.block_size)
        blocks = np.repeat(np.logical_or.reduceat(is_moved, starts, -1), fmt.block_size, -1)[..., : is_moved.shape[-1]]
        decoded = np.where(np.moveaxis(blocks, -1, axis), values * factor, decoded)
    return decoded
