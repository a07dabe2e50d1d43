"""Quantize a folder of Hugging Face into another one, with the perplexity of a text before and after.

    [perplexity] -> quantize -> write -> [perplexity]

Nothing is downloaded, and no code of the folder is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import InvalidValueError, MissingDependencyError, ModelError, OutputError
from quark.files.output import is_same_file
from quark.torch.export import export_onnx, export_safetensors
from quark.torch.language.architecture import find_architecture, is_language_model
from quark.torch.language.checkpoint import Checkpoint, companions_of, write_bytes
from quark.torch.language.loading import import_model_from_safetensors
from quark.torch.language.pipeline import layers_path
from quark.torch.language.saving import check_layout, layout_of
from quark.torch.language.streaming import has_other_names, needs_whole_model
from quark.torch.language.texts import Text, perplexity
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.template import ALGORITHMS, LLMTemplate
from quark.torch.quantization.pipeline import ModelQuantizer

FILE_NAME = "model.onnx"
_WITHOUT_DATA = ("rotation",)
_NEW_NAME_OF_DTYPE = (4, 56)
EXAMPLE_LENGTH = 16  # tokens that the ONNX file is compared with torch on


class Layout(str, Enum):
    """The layout of the result."""

    COMPRESSED_TENSORS = "compressed-tensors"
    QUARK = "quark"
    ONNX = "onnx"


@dataclass(frozen=True)
class LanguageQuantization:
    """What to do. `calibration` is needed by algorithms and by activations with fixed scales. `exclude` None: as the
    template of the model's type says. `dtype` None: that of the folder."""

    folder: Path
    output: Path
    scheme: str = "int4_wo_64"
    algorithms: tuple[str, ...] = ()
    calibration: Text | None = None
    exclude: tuple[str, ...] | None = None
    kv_cache: str | None = None
    layout: Layout = Layout.COMPRESSED_TENSORS
    evaluate: Text | None = None
    device: str = "cpu"
    dtype: torch.dtype | None = None
    has_cache: bool = False  # the ONNX file takes and returns keys and values


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one form of the model: float, quantized."""

    name: str
    value: float


@dataclass(frozen=True)
class QuantizedFolder:
    """The result: the folder, and the perplexities that were measured."""

    path: Path
    perplexities: tuple[Perplexity, ...] = field(default=())


def load_model(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The causal language model of a folder, from safetensors."""
    transformers = _transformers()
    if not (folder / "config.json").is_file():
        raise InvalidValueError(f"'{folder}': expected a folder with config.json and safetensors, as Hugging Face has")
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    kind = {"dtype" if version >= _NEW_NAME_OF_DTYPE else "torch_dtype": dtype or "auto"}
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            **kind,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # config.json may contain anything, and transformers may raise anything for it
        raise ModelError(f"'{folder}' cannot be loaded as a causal language model: {error}") from error
    missing = sorted(loaded["missing_keys"])
    if missing:  # transformers makes random numbers for them
        raise ModelError(f"'{folder}' has no tensor '{missing[0]}', which {type(model).__name__} has")
    if not is_language_model(model):
        raise ModelError(f"'{folder}': {type(model).__name__} has no layers between an embedding and a head")
    assert isinstance(model, nn.Module)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself
        raise ModelError(f"'{folder}' has no tokenizer that can be loaded: {error}") from error


def configuration(request: LanguageQuantization) -> Config:
    """The configuration for the model of the folder, by the template of its type, or by one for any type."""
    kind = Checkpoint(request.folder).config().text("model_type")
    if kind in LLMTemplate.list_available():
        template = LLMTemplate.get(kind)
    else:
        template = LLMTemplate(kind, ["*k_proj", "*v_proj"], exclude_layers_name=["lm_head"])
    config = template.get_config(request.scheme, request.algorithms, request.kv_cache, exclude_layers=request.exclude)
    # readers of compressed-tensors quantize what enters the cache, and not what the projections return
    config.kv_cache_post_rope = request.kv_cache is not None and request.layout is Layout.COMPRESSED_TENSORS
    return config


def quantize_folder(request: LanguageQuantization, tell: Callable[[Perplexity], None] | None = None) -> QuantizedFolder:
    """Quantize the model of a folder and write it to another; `tell` gets perplexities as they are measured.

    Safetensors are written layer by layer, within the memory of two layers, and a run that was killed goes on where it
    stopped. Evaluating, rotations, another `dtype`, ONNX, and folders whose tensors transformers translates when it
    loads them, such as those of experts, need the whole model.
    """
    _check(request)
    config = configuration(request)
    texts = (request.calibration, request.evaluate)
    tokenizer = load_tokenizer(request.folder) if any(texts) else None
    calibration, evaluation = (None if text is None else text.token_ids(tokenizer) for text in texts)
    measured: list[Perplexity] = []

    def measure(name: str, model: nn.Module) -> None:
        measured.append(Perplexity(name, perplexity(model, evaluation or ())))
        if tell is not None:
            tell(measured[-1])

    settings = config.settings()
    needs_all = request.dtype is not None or needs_whole_model(settings) or has_other_names(request.folder)
    if request.layout is Layout.ONNX or needs_all:
        model = load_model(request.folder, request.dtype).to(request.device)
        if evaluation is not None:
            measure("float", model)
        if request.layout is not Layout.ONNX:
            architecture = find_architecture(model, layers_path(settings))
            check_layout(model, architecture, settings, layout_of(request.layout.value, None, "reorder"))
        model = ModelQuantizer(config).quantize_model(model, calibration)
        if evaluation is not None:
            measure("quantized", model)
        _write(model, request, calibration or evaluation or ())
        return QuantizedFolder(request.output, tuple(measured))
    if evaluation is not None:
        measure("float", load_model(request.folder).to(request.device))
    ModelQuantizer(config).direct_quantize_checkpoint(
        *(request.folder, request.output),
        device=request.device,
        dataloader=calibration,
        custom_mode=request.layout.value,
    )
    if evaluation is not None:
        measure(
            "quantized", import_model_from_safetensors(load_model(request.folder).to(request.device), request.output)
        )
    return QuantizedFolder(request.output, tuple(measured))


def _check(request: LanguageQuantization) -> None:
    """Raise for what contradicts itself, before anything is read."""
    if is_same_file(request.output, request.folder):
        raise InvalidValueError(f"'{request.output}' is the folder of the float model: give another one for the result")
    if request.output.exists() and not request.output.is_dir():
        raise OutputError(f"'{request.output}' is a file: expected a folder to write to, or a name that is still free")
    if request.has_cache and request.layout is not Layout.ONNX:
        raise InvalidValueError("a cache as inputs and outputs is for ONNX files: use the layout onnx")
    needy = [name for name in request.algorithms if name.lower() in ALGORITHMS and name.lower() not in _WITHOUT_DATA]
    if needy and request.calibration is None:
        raise InvalidValueError(f"algorithm {needy[0]} needs calibration data: give it a text (--calib)")


def _write(model: nn.Module, request: LanguageQuantization, pieces: Sequence[torch.Tensor]) -> None:
    if request.layout is not Layout.ONNX:
        export_safetensors(model, request.output, request.layout.value)
        return
    config: Any = model.config
    ids = pieces[0][:, :EXAMPLE_LENGTH] if pieces else torch.arange(EXAMPLE_LENGTH)[None] % config.vocab_size
    export_onnx(model, request.output, ids, file_name=FILE_NAME, has_cache=request.has_cache)
    for name, content in companions_of(request.folder).items():
        write_bytes(content, request.output / name)


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - heavy, and optional
    except ImportError as error:
        raise MissingDependencyError("language models need transformers: pip install transformers") from error
    return transformers
