"""Hidden states in front of the current layer: what the float network has there, and what the quantized one has.

The layers of a model get more than hidden states: masks, positions, rotary factors, which may differ from layer to
layer. A run of the model in which no layer computes anything records all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError
from quark.torch.language.architecture import Architecture

_NOT_TAKEN = ("label", "labels", "target", "targets", "use_cache")


class _Stop(Exception):  # noqa: N818 - ends a run early, not an error
    pass


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a call of a layer, apart from the hidden states."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's hidden states for these ones."""
        with torch.no_grad():
            result = layer(hidden, *self.args, **self.kwargs)
        output = result[0] if isinstance(result, tuple) else result
        assert isinstance(output, torch.Tensor)
        return output


@dataclass(eq=False)
class Streams:
    """For each batch, the hidden states before the current layer. `exact` is None if nobody needs the float network's;
    `calls` are those of each layer, then of each batch; `kept` says which positions are no padding, None: all."""

    seen: list[torch.Tensor]
    exact: list[torch.Tensor] | None
    calls: list[list[Call]]
    kept: list[torch.Tensor | None]

    def __len__(self) -> int:
        return len(self.seen)

    def advance(self, calls: Sequence[Call], layer: nn.Module, exact_layer: nn.Module | None) -> None:
        """Go behind a layer: the rounded one, and its float copy."""
        if self.exact is not None:
            assert exact_layer is not None
            self.exact = [call.run(exact_layer, hidden) for call, hidden in zip(calls, self.exact, strict=True)]
        self.seen = [call.run(layer, hidden) for call, hidden in zip(calls, self.seen, strict=True)]


def start_streams(model: nn.Module, architecture: Architecture, data: Iterable[Any], *, has_exact: bool) -> Streams:
    """Hidden states before the first layer for every batch of token ids, or of keyword arguments."""
    layers = model.get_submodule(architecture.layers)
    assert isinstance(layers, nn.ModuleList)
    calls: list[list[Call]] = [[] for _ in layers]
    first: list[torch.Tensor] = []
    kept: list[torch.Tensor | None] = []
    device = next(model.get_submodule(architecture.embedding).parameters()).device
    for number, arguments in enumerate(batches_of(data), 1):
        arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        mask = arguments.get("attention_mask")
        is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if is_mask and mask is not None and not bool(mask.any()):
            raise InvalidValueError(f"batch {number} of the calibration data: its attention_mask leaves out all of it")
        kept.append(mask.bool() if is_mask and mask is not None and not bool(mask.all()) else None)
        with _Recording(layers, calls, first), torch.no_grad():
            try:
                model(**arguments, use_cache=False)
            except _Stop:
                pass
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ModelError(
                    f"{type(model).__name__} does not run on batch {number} of the calibration data: {error}"
                ) from error
        if len(first) != number:
            raise ModelError(
                f"{type(model).__name__} does not call the layers of '{architecture.layers}' by their order"
            )
    if not first:
        raise InvalidValueError(
            "the calibration data is empty: expected at least one batch of token ids; a generator can be read only once"
        )
    return Streams(first, list(first) if has_exact else None, calls, kept)


def batches_of(data: Any) -> Iterator[dict[str, Any]]:
    """The inputs of the model, batch by batch; a tensor or a dictionary is one batch."""
    if not isinstance(data, Iterable):
        raise InvalidValueError(
            f"the calibration data is a {type(data).__name__}: expected batches of token ids, such as a list of tensors"
        )
    items = [data] if isinstance(data, (torch.Tensor, Mapping)) else data
    for number, item in enumerate(items, 1):
        yield arguments_of(item, f"batch {number} of the calibration data")


def arguments_of(item: Any, what: str = "the batch") -> dict[str, Any]:
    """The keyword arguments of the model in what a loader gave: token ids, (ids, labels), or a dictionary.

    >>> arguments_of({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([1])})
    {'input_ids': tensor([[1, 2]])}
    """
    if isinstance(item, Mapping):
        return {str(key): value for key, value in item.items() if key not in _NOT_TAKEN}
    ids = item[0] if isinstance(item, (list, tuple)) and item else item
    if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
        raise InvalidValueError(
            f"{what}: expected token ids, an integer tensor [batch, length], or a dictionary with input_ids; got "
            f"{type(ids).__name__}"
        )
    return {"input_ids": ids if ids.dim() == 2 else ids[None]}


class _Recording:
    """Within the block, layers compute nothing: their calls are recorded, and hidden states pass through."""

    def __init__(self, layers: nn.ModuleList, calls: list[list[Call]], first: list[torch.Tensor]) -> None:
        self._layers, self._calls, self._first = layers, calls, first

    def __enter__(self) -> None:
        for index, layer in enumerate(self._layers):
            layer.forward = self._recorder(index, type(layer).forward.__get__(layer))

    def __exit__(self, *exception: object) -> None:
        for layer in self._layers:
            del layer.forward  # the method of the class shows again

    def _recorder(self, index: int, original: Any) -> Any:
        is_last = index == len(self._layers) - 1

        def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self._first.append(hidden_states.detach())
            self._calls[index].append(Call(args, kwargs))
            if is_last:
                raise _Stop
            if not hasattr(self, "_is_tuple"):  # older classes return hidden states with attention beside them
                self._is_tuple = isinstance(original(hidden_states, *args, **kwargs), tuple)
            return (hidden_states,) if self._is_tuple else hidden_states

        return record


def rows(hidden: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Values [batch, length, features] as rows, without those of padding."""
    if hidden.dim() == 3 and kept is not None and kept.shape == hidden.shape[:2]:
        return hidden[kept]
    return hidden.reshape(-1, hidden.shape[-1])


def run_to(
    layer: nn.Module, call: Call, hidden: torch.Tensor, paths: Sequence[str], *, is_output: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run a layer as far as needed, and return what the modules of these paths get (or return) there."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(path: str, value: Any) -> None:
        tensors[path] = (value[0] if isinstance(value, tuple) else value).detach()  # attention returns its weights too
        if len(tensors) == len(paths):
            raise _Stop

    hooks = []
    for path in paths:
        module = layer.get_submodule(path)
        if is_output:
            hooks.append(module.register_forward_hook(lambda _m, _args, out, path=path: keep(path, out)))
        else:
            hooks.append(module.register_forward_pre_hook(lambda _m, args, path=path: keep(path, args[0])))
    try:
        call.run(layer, hidden)
    except _Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    missing = [path for path in paths if path not in tensors]
    if missing:
        raise ModelError(f"'{missing[0]}' is not called when its layer runs: exclude it")
    yield from tensors.items()
