"""The parts of a language model, found in its modules; no list of model families is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeGuard

import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError

_TRANSPOSED = "Conv1D"  # the class of linear layers with weights [inputs, outputs]


@dataclass(frozen=True)
class Architecture:
    """Paths of modules. `layers` is the list of layers, `norm` the normalization behind the last one and `head` the
    projection onto the vocabulary, which may be missing. `is_tied`: head and embedding are one parameter."""

    layers: str
    count: int
    embedding: str
    norm: str | None
    head: str | None
    is_tied: bool

    def layer(self, index: int) -> str:
        """The path of a layer."""
        return f"{self.layers}.{index}"

    def has(self, path: str) -> bool:
        """True for a module of the layers, and for the head: for what is quantized."""
        return path.startswith(f"{self.layers}.") or path == self.head


def is_language_model(model: Any) -> TypeGuard[nn.Module]:
    """True for a causal language model as Hugging Face has them: layers in a list between an embedding and a head.

    Encoder and decoder are two lists that run side by side, and a masked language model (BertForMaskedLM) may take more
    than token ids and a mask: such models are quantized on their graphs.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return False
    if getattr(model.config, "is_encoder_decoder", False) or type(model).__name__.endswith("ForMaskedLM"):
        return False
    for name in ("get_input_embeddings", "get_output_embeddings"):
        find = getattr(model, name, None)
        try:
            if not callable(find) or not isinstance(find(), nn.Module):
                return False
        except NotImplementedError:  # raised by models of images and sound in transformers 5
            return False
    return _layer_list(model) is not None


def find_architecture(model: nn.Module, layers: str = "") -> Architecture:
    """The parts of a model; `layers` is the path of its list of layers, if the largest one is not meant."""
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    layers_path = layers or _layer_list(model)
    if layers_path is None:
        raise ModelError(
            f"{type(model).__name__} has no list of layers: expected a torch.nn.ModuleList with linear layers in it; "
            "hand other models over as graphs, with quark.torch.export_for_training"
        )
    try:
        items = model.get_submodule(layers_path)
    except AttributeError as error:
        raise ModelError(f"model_decoder_layers '{layers_path}': {type(model).__name__} has no such module") from error
    if not isinstance(items, nn.ModuleList) or not len(items):
        raise ModelError(f"model_decoder_layers '{layers_path}': expected a ModuleList, it is a {type(items).__name__}")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    parent = model.get_submodule(layers_path.rpartition(".")[0])
    beside = {name: child for name, child in parent.named_children() if is_norm(child)}
    prefix = layers_path.rpartition(".")[0]
    return Architecture(
        layers_path,
        len(items),
        paths[id(embedding)],
        next((f"{prefix}.{name}".lstrip(".") for name in reversed(beside)), None),
        None if head is None else paths[id(head)],
        head is not None and head.weight is embedding.weight,
    )


def is_inside(path: str, names: Sequence[str]) -> bool:
    """True if the path of a module in a layer ends with one of the names, which may have wildcards; or without any."""
    return not names or any(fnmatch(path, f"*{name}") for name in names)


def check_inside(model: nn.Module, architecture: Architecture, names: Sequence[str]) -> None:
    """Raise InvalidValueError for a name that fits no module of any layer."""
    layers = (model.get_submodule(architecture.layer(index)) for index in range(architecture.count))
    paths = {path for layer in layers for path, _ in layer.named_modules()}
    for name in names:
        if not any(is_inside(path, [name]) for path in paths):
            raise InvalidValueError(
                f"inside_layer_modules '{name}': no layer of '{architecture.layers}' has such a module"
            )


def is_norm(module: nn.Module) -> bool:
    """True for LayerNorm, RMSNorm and their relatives, by name: every model brings a class of its own."""
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, torch.Tensor) and weight.dim() == 1


def linears_of(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers in a module with their paths, in the order in which they were defined."""
    for path, module in layer.named_modules():
        if type(module) is nn.Linear:
            yield path, module


def all_linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The sizes [outputs, inputs] of all linear layers of a model, also of those that `with_linears` replaces."""
    linears = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear or _is_like_linear(module):
            rows, columns = module.weight.shape
            linears[path] = (columns, rows) if type(module).__name__ == _TRANSPOSED else (rows, columns)
    return linears


def with_linears(layer: nn.Module) -> None:
    """Replace the transposed linear layers of GPT-2 (Conv1D) and those of Falcon, which are a class of their own, by
    ordinary ones, which compute the same."""
    for path, module in list(layer.named_modules()):
        if not _is_like_linear(module):
            continue
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        matrix = weight.detach().T.contiguous() if type(module).__name__ == _TRANSPOSED else weight.detach()
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias is not None, device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(matrix, requires_grad=weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=weight.requires_grad)
        layer.set_submodule(path, linear)


def _is_like_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "FalconLinear" or (type(module).__name__ == _TRANSPOSED and hasattr(module, "nf"))


def _layer_list(model: nn.Module) -> str | None:
    """The list with the most parameters in linear layers, of modules of one class, and not inside of another list."""
    best, most = None, 0
    seen: list[str] = []
    for path, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList)
            or not len(module)
            or any(path.startswith(f"{prefix}.") for prefix in seen)
        ):
            continue
        seen.append(path)
        size = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)
        if len({type(layer) for layer in module}) == 1 and size > most:
            best, most = path, size
    return best
