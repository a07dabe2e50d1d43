"""Rotation of a language model, on its modules.

    R1   the hidden states between layers: folded into the embedding, the linear layers that write to them and those
         that read them behind a normalization; or, online, the inputs of the latter
    R2   the values of attention, head by head, folded into two projections
    R3   queries and keys behind the rotary embedding, at inference
    R4   the inputs of the down projections, at inference

What is folded is done before the first layer is quantized, and checked by running the model on a few tokens. What is
done at inference becomes part of the quantized linear layer, before the quantizer of its input.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError, ModelError
from quark.features.rotation.matrices import (
    Array,
    factors,
    fold_norm,
    product,
    rotate,
    rotate_inputs,
    rotate_outputs,
    rotation,
)
from quark.features.rotation.options import LanguageRotationOptions
from quark.plan import SkippedNode
from quark.torch.language.architecture import is_norm, linears_of, with_linears
from quark.torch.language.branches import MatrixRotation
from quark.torch.language.pipeline import LayerWork, ModelWork

NAME = "rotation"
PROBE = 8  # tokens that models are compared on
MOST_ERROR = 1e-4  # error of the rotated model's logits, relative to the largest, in float32
MOST_ERROR_HALF = 0.05
ROTARY = "apply_rotary_pos_emb"  # the name of the function in Hugging Face's code
_VALUES = ("v_proj", "value", "v", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv")


def before_layers(work: ModelWork, options: LanguageRotationOptions) -> list[AlgorithmFacts]:
    """Fold what can be folded into weights, and rotate queries and keys."""
    _check_names(work, options)
    for index in range(work.architecture.count):
        with_linears(work.model.get_submodule(work.architecture.layer(index)))
    expected = _logits(work.model)
    folding = _Folding(work, options)
    if options.r1 and not options.is_online:
        folding.rotate_hidden_states()
    if options.r2:
        folding.rotate_values()
    if options.r3:
        folding.rotate_queries()
    _check(expected, _logits(work.model))
    return [AlgorithmFacts(NAME, tuple(folding.changed))] if folding.changed else []


def _check_names(work: ModelWork, options: LanguageRotationOptions) -> None:
    if options.layers and options.layers != work.architecture.layers:
        raise InvalidValueError(
            f"model_decoder_layers '{options.layers}': the layers of this model are '{work.architecture.layers}'"
        )
    known = [path for path, _ in work.model.named_modules()]
    inside = [path for path, _ in work.model.get_submodule(work.architecture.layer(0)).named_modules()]
    for name, pattern, paths in (
        ("backbone", options.backbone, known),
        ("self_attn", options.attention, inside),
        ("mlp", options.feed_forward, inside),
    ):
        if pattern and not any(fnmatch(path, pattern) for path in paths):
            raise InvalidValueError(f"{name} '{pattern}' of algorithm 'rotation' is not a module of the model")


def before_rounding(work: LayerWork, options: LanguageRotationOptions) -> list[AlgorithmFacts]:
    """Rotate the inputs of a layer's linear layers at inference."""
    if not (options.r4 or options.is_online):
        return []
    changed: list[str] = []
    left: list[SkippedNode] = []
    modules: dict[int, OnlineRotation] = {}  # shared, so that layers with one input still have one input
    for path in _online_paths(work, options):
        linear = work.linear(path)
        size = options.block or linear.in_features
        if linear.in_features % size:
            reason = f"rotation_size = {size} does not divide its {linear.in_features} inputs"
            left.append(SkippedNode(work.full_name(path), "Linear", reason))
            continue
        module = modules.setdefault(size, OnlineRotation(size).to(linear.weight.device))
        weight = torch.from_numpy(rotate_inputs(_array(linear.weight), module.product()))
        work.set_rotated(path, weight, module)
        changed.append(f"{work.full_name(path)}: its input")
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))] if changed or left else []


class OnlineRotation(MatrixRotation):
    """x R for every block of channels of the matrix's size. A large matrix is applied as two small factors."""

    def __init__(self, size: int) -> None:
        left, matrix = factors(size)
        super().__init__(torch.from_numpy(matrix).float(), None if left is None else torch.from_numpy(left).float())
        self.size = size

    def product(self) -> Array:
        """The matrix in float64, which the weight behind it has to undo."""
        return product(*factors(self.size))

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _online_paths(work: LayerWork, options: LanguageRotationOptions) -> list[str]:
    """The linear layers whose inputs are rotated at inference, among those that are quantized."""
    writers = _last_of_parents(path for path, _ in linears_of(work.layer))
    down = {path for path in writers if not _is_attention(path)}
    if options.feed_forward:
        down = {path for path in writers if fnmatch(path.rpartition(".")[0], options.feed_forward)}
    paths = down if options.r4 else set()
    if options.is_online:
        groups = options.groups(work.architecture.count)
        named = {name for group in groups for name in (group.readers if group.targets is None else group.targets)}
        rotated = writers if options.r2 else down
        paths = paths | {
            path
            for path in work.targets
            if (work.full_name(path) in named if options.has_groups else path not in rotated)
        }
    return [path for path in work.targets if path in paths]


def _last_of_parents(paths: Iterable[str]) -> set[str]:
    """The linear layers that write to the hidden states: the last of attention, and the last of a feed-forward part."""
    parents: dict[str, list[str]] = {}
    for path in paths:
        parents.setdefault(path.rpartition(".")[0], []).append(path)
    return {paths[-1] for paths in parents.values() if len(paths) > 1}


def _is_attention(path: str) -> bool:
    return any(word in path.lower() for word in ("attn", "attention"))


# ---- folding ----


@dataclass(eq=False)
class _Stream:
    """The layers that write to the hidden states and read them, by full paths."""

    norms: dict[str, list[str]] = field(default_factory=dict)  # the linear layers behind each normalization
    writers: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)


class _Folding:
    """Rotations that weights take, in one model."""

    def __init__(self, work: ModelWork, options: LanguageRotationOptions) -> None:
        self.work, self.model, self.options = work, work.model, options
        self.changed: list[str] = []

    def rotate_hidden_states(self) -> None:
        """Fold R1: gains of normalizations first, then the rotation on both sides."""
        stream = self._named_stream() if self.options.has_groups else self._found_stream()
        self._untie()
        table = self.model.get_submodule(self.work.architecture.embedding)
        assert isinstance(table, nn.Embedding)
        size = self.options.block or table.embedding_dim
        if table.embedding_dim % size:
            raise InvalidValueError(
                f"rotation_size = {size} does not divide the {table.embedding_dim} channels between layers"
            )
        norms = [self.model.get_submodule(path) for path in stream.norms]
        has_mean = any(_subtracts_mean(norm) for norm in norms)
        matrix = rotation(size, is_random=self.options.is_random, keeps_mean=has_mean)
        for norm, paths in zip(norms, stream.norms.values(), strict=True):
            linears = [self._linear(path) for path in paths]
            _fold(norm, linears)
            for path, linear in zip(paths, linears, strict=True):
                _set(linear.weight, rotate_inputs(_array(linear.weight), matrix))
                self.changed.append(f"{path}: its input")
        for path in stream.writers:
            linear = self._linear(path)
            weight, bias = rotate_outputs(_array(linear.weight), _bias(linear), matrix)
            _set(linear.weight, weight)
            if bias is not None:
                _set(linear.bias, bias)
            self.changed.append(f"{path}: its output")
        for path in stream.embeddings:
            embedding = self.model.get_submodule(path)
            assert isinstance(embedding, nn.Embedding)
            _set(embedding.weight, rotate(_array(embedding.weight), matrix))
            self.changed.append(f"{path}: its output")

    def _linear(self, path: str) -> nn.Linear:
        try:
            linear = self.model.get_submodule(path)
        except AttributeError as error:
            raise InvalidValueError(f"scaling_layers: {type(self.model).__name__} has no module '{path}'") from error
        if not isinstance(linear, nn.Linear):
            raise InvalidValueError(f"scaling_layers: '{path}' is a {type(linear).__name__}: expected a linear layer")
        return linear

    def _named_stream(self) -> _Stream:
        """The stream that the user's scaling_layers name; layers that a model does not have are an error."""
        stream = _Stream()
        known = dict(self.model.named_modules(remove_duplicate=False))
        for group in self.options.groups(self.work.architecture.count):
            if group.norm not in known:
                raise InvalidValueError(f"scaling_layers: norm_module '{group.norm}' is not a module of the model")
            stream.norms.setdefault(group.norm, []).extend(group.readers)
            for path in group.writers:
                target = stream.embeddings if isinstance(known.get(path), nn.Embedding) else stream.writers
                if path not in target:
                    target.append(path)
        return stream

    def _found_stream(self) -> _Stream:
        """The stream that a run on a few tokens shows: which linear layers read the result of which normalization."""
        parts, model = self.work.architecture, self.model
        table = model.get_submodule(parts.embedding)
        assert isinstance(table, nn.Embedding)
        size = table.embedding_dim
        inside = [
            (f"{parts.layer(index)}.{path}", module)
            for index in range(parts.count)
            for path, module in model.get_submodule(parts.layer(index)).named_modules()
        ]
        norms = {path: module for path, module in inside if is_norm(module) and len(module.weight) == size}
        linears = {path: module for path, module in inside if type(module) is nn.Linear}
        if parts.norm is not None:
            norms[parts.norm] = model.get_submodule(parts.norm)
        head = None if parts.head is None else model.get_submodule(parts.head)
        if isinstance(head, nn.Linear) and parts.head is not None:
            linears[parts.head] = head
        behind = _read_by(model, norms, linears)
        alone = [path for path in norms if not behind[path]]
        if alone:
            raise ModelError(
                f"rotation R1: no linear layer reads the result of the normalization '{alone[0]}' as it is, so its "
                "gain cannot be folded; use online_r1_rotation=True, or name the layers in scaling_layers"
            )
        readers = {path for paths in behind.values() for path in paths}
        writers = [path for path, linear in linears.items() if path not in readers and linear.out_features == size]
        tables = [
            path
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding)
            and module.embedding_dim == size
            and not path.startswith(f"{parts.layers}.")
        ]
        return _Stream(behind, writers, tables)

    def _untie(self) -> None:
        """Give the head a weight of its own: the gain before it is not in the embedding."""
        parts, model = self.work.architecture, self.model
        if not parts.is_tied or parts.head is None:
            return
        head = model.get_submodule(parts.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)  # type: ignore[operator]
        if getattr(model.config, "tie_word_embeddings", False):
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
        self.work.architecture = replace(parts, is_tied=False)

    def rotate_values(self) -> None:
        """Fold R2 into the projections of values and of the result of attention."""
        for index in range(self.work.architecture.count):
            base = self.work.architecture.layer(index)
            layer = self.model.get_submodule(base)
            pairs = _value_pairs(layer, self.options)
            if not pairs:
                raise ModelError(
                    f"rotation R2: '{base}' has no projections of values and outputs that are known; name them with "
                    "v_proj and o_proj"
                )
            for values, outputs in pairs:
                self._rotate_heads(layer, values, outputs)
                self.changed += [f"{base}.{values}: its output by heads", f"{base}.{outputs}: its input by heads"]

    def _rotate_heads(self, layer: nn.Module, values: str, outputs: str) -> None:
        value, output = layer.get_submodule(values), layer.get_submodule(outputs)
        assert isinstance(value, nn.Linear)
        assert isinstance(output, nn.Linear)
        config: Any = self.model.config
        heads = int(config.num_attention_heads)
        size, rest = divmod(output.in_features, heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        count = key_heads * size
        if rest or value.out_features not in (count, 2 * count + heads * size):
            raise ModelError(
                f"rotation R2: '{values}' has {value.out_features} outputs, which are not those of {key_heads} heads "
                f"of {size} channels"
            )
        matrix = rotation(size, is_random=self.options.is_random_r2)
        weight, bias = _array(value.weight), _bias(value)
        weight[-count:] = rotate(weight[-count:], matrix, 0)  # queries and keys may come before the values
        _set(value.weight, weight)
        if bias is not None:
            bias[-count:] = rotate(bias[-count:], matrix)
            _set(value.bias, bias)
        _set(output.weight, rotate_inputs(_array(output.weight), matrix))

    def rotate_queries(self) -> None:
        """R3: let the attention modules rotate what their rotary embedding returns."""
        turned, options = 0, self.options
        for index in range(self.work.architecture.count):
            for path, module in self.model.get_submodule(self.work.architecture.layer(index)).named_modules():
                forward = inspect.unwrap(type(module).forward)
                if options.attention and not fnmatch(path, options.attention):
                    continue
                if ROTARY in getattr(forward, "__globals__", {}) and ROTARY in forward.__code__.co_names:
                    module.forward = _with_rotation(module, forward)
                    self.changed.append(f"{self.work.architecture.layer(index)}.{path}: its queries and keys")
                    turned += 1
        if not turned:
            raise ModelError(f"rotation R3: no attention module of {type(self.model).__name__} calls {ROTARY}")


def _with_rotation(module: nn.Module, forward: Any) -> Any:
    """The forward of an attention module, with queries and keys rotated behind the rotary embedding."""
    names = {**forward.__globals__, ROTARY: _RotatedPositions(forward.__globals__[ROTARY])}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(made, module)


class _RotatedPositions:
    """The rotary embedding with a rotation behind it, which cancels in the product of queries and keys."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = self.function(*args, **kwargs)
        matrix = _of_heads(queries.shape[-1]).to(queries.device)
        turned = ((heads.float() @ matrix).to(heads.dtype) for heads in (queries, keys))
        return next(turned), next(turned)


@lru_cache(maxsize=8)
def _of_heads(size: int) -> torch.Tensor:
    return torch.from_numpy(rotation(size)).float()


def _value_pairs(layer: nn.Module, options: LanguageRotationOptions) -> list[tuple[str, str]]:
    """The projections that compute the values, and those that read the result of attention, by paths in the layer."""
    linears = dict(linears_of(layer))
    if options.values or options.outputs:
        for name, path in (("v_proj", options.values), ("o_proj", options.outputs)):
            if path not in linears:
                raise InvalidValueError(f"rotation: {name} '{path}' is not a linear layer of the model's layers")
        return [(options.values, options.outputs)]
    parents: dict[str, list[str]] = {}
    for path in linears:
        if _is_attention(path):
            parents.setdefault(path.rpartition(".")[0], []).append(path)
    pairs = []
    for parent, paths in parents.items():
        named = [f"{parent}.{name}".lstrip(".") for name in _VALUES]
        values = next((path for path in named if path in paths), None)
        if values is not None and len(paths) > 1 and paths[-1] != values:
            pairs.append((values, paths[-1]))
    return pairs


def _read_by(model: nn.Module, norms: dict[str, nn.Module], linears: dict[str, nn.Linear]) -> dict[str, list[str]]:
    """The linear layers that read the result of each normalization, found in a run on a few tokens."""
    written: dict[Any, str] = {}
    alive: list[torch.Tensor] = []  # kept alive, so that no two tensors have the same memory
    paths_by_norm: dict[str, list[str]] = {path: [] for path in norms}

    def key(value: torch.Tensor) -> Any:
        return value.data_ptr(), value.shape  # a slice of all positions, as before a head, is the same tensor

    def wrote(path: str, value: torch.Tensor) -> None:
        alive.append(value)
        written[key(value)] = path

    def read(path: str, value: torch.Tensor) -> None:
        source = written.get(key(value))
        if source is not None and path not in paths_by_norm[source]:
            paths_by_norm[source].append(path)

    hooks = [m.register_forward_hook(lambda _m, _args, out, path=path: wrote(path, out)) for path, m in norms.items()]
    hooks += [
        m.register_forward_pre_hook(lambda _m, args, path=path: read(path, args[0])) for path, m in linears.items()
    ]
    try:
        _logits(model)
    finally:
        for hook in hooks:
            hook.remove()
    return paths_by_norm


def _logits(model: nn.Module) -> torch.Tensor:
    """The logits of a model for a few tokens."""
    table = model.get_input_embeddings()  # type: ignore[operator]
    count = int(table.weight.shape[0])
    ids = (torch.arange(PROBE, device=table.weight.device) * 7 + 3) % count
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits
    return result


def _check(expected: torch.Tensor, actual: torch.Tensor) -> None:
    wide = expected.double()
    error = float((actual.double() - wide).abs().max() / wide.abs().max().clamp(min=1e-30))
    most = MOST_ERROR if expected.dtype in (torch.float32, torch.float64) else MOST_ERROR_HALF
    if not error <= most:
        raise ModelError(
            f"rotation: the rotated model differs (largest error {error:.2g} of the largest logit), so "
            "it has a form that is not understood; name the layers in scaling_layers, or use online_r1_rotation=True"
        )


def _subtracts_mean(norm: nn.Module) -> bool:
    """True for LayerNorm, False for RMSNorm: whether a number that is added to all channels changes the result."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    x = torch.linspace(-1, 2, len(weight), device=weight.device, dtype=weight.dtype)[None]
    with torch.no_grad():
        first, second = norm(x), norm(x + 3)
    return bool(torch.allclose(first.float(), second.float(), atol=1e-2))


def _fold(norm: nn.Module, linears: Iterable[nn.Linear]) -> None:
    """Move gain and shift of a normalization into the linear layers behind it."""
    weight, shift = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, torch.Tensor)
    offset = _gain_offset(norm)
    gain = _array(weight) + offset
    for linear in linears:
        folded, bias = fold_norm(_array(linear.weight), _bias(linear), gain, None if shift is None else _array(shift))
        _set(linear.weight, folded)
        if bias is None:
            continue
        if _bias(linear) is None:
            linear.bias = nn.Parameter(torch.zeros_like(linear.weight[:, 0]), requires_grad=False)
        _set(linear.bias, bias)
    _set(weight, np.full(gain.shape, 1.0 - offset))
    if isinstance(shift, torch.Tensor):
        _set(shift, np.zeros(gain.shape))


def _gain_offset(norm: nn.Module) -> float:
    """1 for normalizations that multiply by 1 + weight, as Gemma's do; 0 for all others."""
    if isinstance(norm, nn.LayerNorm):
        return 0.0
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    signs = torch.ones_like(weight)
    signs[::2] = -1  # their mean is near 0 and their root mean square is 1
    with torch.no_grad():
        seen = (norm(signs[None])[0] * signs).float() - weight.float()
    return float(seen.median().round())


def _array(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().double().cpu().numpy())


def _bias(linear: nn.Linear) -> Array | None:
    return None if linear.bias is None else _array(linear.bias)


def _set(tensor: torch.Tensor, values: Array) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)).to(tensor.device, tensor.dtype))
