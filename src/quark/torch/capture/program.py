"""Export a model to a program: its computation as a graph of aten operators.

The batch stays free. The tracer would treat a batch of 1 as a property of the model, so such an example is repeated.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import linecache
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from quark.errors import InvalidValueError, ModelError
from quark.torch.capture.signature import PLAIN

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position, and by name
DynamicShapes = Mapping[str, Mapping[int, Any] | Sequence[Any] | None]
_LIMIT = re.compile(r"(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)")  # torch's suggestion for an axis, by name
_NOT_THE_MODELS = (Path(torch.__file__).parent, Path(__file__).parents[1])  # code of torch and of quark.torch


def export_for_training(
    model: nn.Module,
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_shapes: DynamicShapes | None = None,
) -> ExportedProgram:
    """Export a model on any version of torch. The model keeps its mode and is not changed.

    `dynamic_batch`: the first axis is left free for every tensor that has the same length there as the first tensor. If
    the model fixes it, it stays fixed, with a warning. So does the length of token ids and masks, the second axis of
    integer and boolean tensors with two axes, and every axis of the same length behind the first of other inputs.

    `dynamic_shapes` says instead which axes are free, by the names of arguments: `{"input_ids": {0: "batch", 1:
    "sequence"}}`. An axis has a name, a `torch.export.Dim`, or None if it is fixed; axes with the same name have
    the same size, which the model may limit, as a table of positions does. Inputs that are not named have fixed shapes.

    >>> program = export_for_training(nn.Linear(4, 2), (torch.rand(1, 4),))
    >>> program.module()(torch.rand(7, 4)).shape
    torch.Size([7, 2])
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"export_for_training: expected a torch.nn.Module, got {type(model).__name__}")
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    given = (arguments, dict(kwargs or {}))
    tensors = [value for value in pytree.tree_leaves(given) if isinstance(value, torch.Tensor) and value.dim()]
    with _in_eval_mode(model):
        if not tensors or (not dynamic_batch and dynamic_shapes is None):
            return _export(model, *given)
        batch = int(tensors[0].shape[0])
        lengths = {int(x.shape[1]) for x in tensors if x.dim() == 2 and not x.is_floating_point()} - {0, 1}

        def has_batch(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch

        def repeated(value: Any) -> Any:
            return value.repeat(2, *[1] * (value.dim() - 1)) if batch == 1 and has_batch(value) else value

        def free_axes(value: Any, has_lengths: bool) -> dict[int, Any] | None:
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            axes = [axis for axis, size in enumerate(sizes) if axis and has_lengths and int(size) in lengths]
            return dict.fromkeys([0, *axes] if has_batch(value) else axes, Dim.AUTO) or None

        longer, longer_named = pytree.tree_map(repeated, given)
        if dynamic_shapes is not None:
            return _export_named(model, given, (longer, longer_named), dynamic_shapes)
        shapes = pytree.tree_map(lambda value: free_axes(value, bool(lengths)), given)
        try:
            program = _export(model, longer, longer_named, shapes)
        except ModelError:
            if not lengths:
                raise
            batch_alone = pytree.tree_map(lambda value: free_axes(value, False), given)
            program = _export(model, longer, longer_named, batch_alone)
        if lengths and not _has_free_axis(program, 1):
            warnings.warn(f"{type(model).__name__} fixes the length of its input: {min(lengths)}", stacklevel=2)
        if batch != 1 or _has_free_axis(program, 0):
            return program
        warnings.warn(f"{type(model).__name__} fixes its batch: it was exported for a batch of {batch}", stacklevel=2)
        return _export(model, *given)


def _export_named(
    model: nn.Module, given: Arguments, longer: Arguments, dynamic_shapes: DynamicShapes
) -> ExportedProgram:
    """Export with the axes that are named; `longer` is the example for a free batch."""
    shapes = _named_shapes(model, given, dynamic_shapes, {})
    is_free = any(axes and axes.get(0) is not None for axes in (*shapes[0], *shapes[1].values()))
    example = longer if is_free else given
    try:
        return _export(model, *example, shapes)
    except ModelError as error:
        limits = _suggested_limits(str(error.__cause__))
        if not limits:
            raise
        return _export(model, *example, _named_shapes(model, given, dynamic_shapes, limits))


def _has_free_axis(program: ExportedProgram, axis: int) -> bool:
    """True if an input of the program has no fixed size on that axis."""
    names = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape[axis : axis + 1]]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _suggested_limits(message: str) -> dict[str, dict[str, int]]:
    """Return the smallest and largest sizes of axes, by name, that torch asks for; empty if it asks for anything else,
    such as a fixed size."""
    lines = message.partition("Suggested fixes:")[2].strip().partition("\n\n")[0].splitlines()
    matches = [_LIMIT.fullmatch(line.strip()) for line in lines]
    limits = {
        match[1]: {"min": int(match[2] or 0), **({"max": int(match[3])} if match[3] else {})}
        for match in matches
        if match
    }
    return limits if all(matches) else {}


def _named_shapes(
    model: nn.Module,
    given: Arguments,
    shapes: DynamicShapes,
    limits: Mapping[str, Mapping[str, int]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the free axes of all arguments, in the form of `given`, with the limits of those that have names."""
    signature = inspect.signature(model.forward)
    names = [*list(signature.parameters)[: len(given[0])], *given[1]]
    strange = [name for name in shapes if name not in names]
    if strange:
        raise InvalidValueError(
            f"dynamic_shapes: {', '.join(strange)} is not among the inputs, which are {', '.join(names)}"
        )
    dims: dict[str, Any] = {}

    def dim_of(size: Any) -> Any:
        return dims.setdefault(size, Dim(size, **limits.get(size, {}))) if isinstance(size, str) else size

    def axes_of(name: str, value: Any) -> Any:
        axes = shapes.get(name)
        if not axes:
            return None
        axes = dict(enumerate(axes)) if isinstance(axes, (list, tuple)) else dict(axes)
        rank = value.dim() if isinstance(value, torch.Tensor) else 0
        if any(not isinstance(axis, int) or not 0 <= axis < rank for axis in axes):
            raise InvalidValueError(
                f"dynamic_shapes: '{name}' has {rank} axes, counted from 0, and {sorted(map(str, axes))} were given"
            )
        return {axis: dim_of(size) for axis, size in axes.items()}

    positional = tuple(axes_of(name, value) for name, value in zip(names, given[0], strict=False))
    return positional, {name: axes_of(name, value) for name, value in given[1].items()}


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any = None) -> ExportedProgram:
    free = None
    if shapes is not None:  # by the parameters of the model's forward; those behind a star count as one
        signature = inspect.signature(model.forward)
        try:
            free = dict(signature.bind(*shapes[0], **shapes[1]).arguments)
        except TypeError as error:
            raise ModelError(
                f"{type(model).__name__} takes {signature}, and the example has {len(args)} positional arguments and "
                f"{', '.join(kwargs) or 'none'} by name: {error}"
            ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            try:
                return torch.export.export(model, args, kwargs, dynamic_shapes=free, strict=False)
            except RuntimeError as error:
                if "register a pytree" not in str(error) or not _register_outputs(model, args, kwargs):
                    raise
            return torch.export.export(model, args, kwargs, dynamic_shapes=free, strict=False)
        except Exception as error:
            raise ModelError(why_not_run(model, args, kwargs) or _why_not_captured(model, error)) from error


def _register_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Register dataclasses and Hugging Face caches that the model returns with torch; True if there are any."""
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*args, **kwargs))
    kinds = {type(leaf) for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))}
    for kind in kinds:
        if kind.__name__ == "DynamicCache" and kind.__module__.startswith("transformers"):
            importlib.import_module("transformers.integrations.executorch").register_dynamic_cache_export_support()
        elif dataclasses.is_dataclass(kind):
            torch.export.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
        else:
            return False
    return bool(kinds)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def why_not_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say what stops the model itself from running; empty if it runs, so that the tracer is to blame."""

    def described(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"

    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the model is the user's code
        given = [*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())]
        return (
            f"{type(model).__name__} does not run on {', '.join(given)}{_at(error)}: {type(error).__name__}: "
            f"{_first_line(error)}. Check the shapes, types and devices of its inputs and parameters"
        )
    return ""


def _why_not_captured(model: nn.Module, error: Exception) -> str:
    """Say what stopped the tracer, at which line of the model, and what to do."""
    reason = f"{type(error).__name__}: {_first_line(error)}. "
    what = f"{type(model).__name__} cannot be captured as a graph{_at(error)}: {reason}"
    if "not a known type" in str(error) or "register a pytree" in str(error):
        return f"{what}Let it take and return tensors, tuples or dictionaries, or torch.export.register_dataclass(...)"
    if "Constraints violated" in str(error):
        why = next((line for line in str(error).splitlines() if line.strip().startswith("- ")), "").strip(" -.")
        return (
            f"{type(model).__name__} cannot be captured with the free axes of dynamic_shapes: {why}. Name the axis in "
            "every input that has it, such as the mask of token ids, or leave it fixed"
        )
    return (
        f"{what}A graph has no branches or loops that depend on values: compute with torch.where or torch.cond there, "
        "move that part out of the model, or export the model to ONNX with whatever tool it has and quantize that file "
        "with quark.onnx, which leaves control flow in float"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300].rstrip(".")


def _at(error: BaseException | None) -> str:
    """`, at` the last line of the model's own code that led to the error or its cause; empty if there is none."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            path = Path(frame.filename)
            is_model = path.is_file() and "contextlib" not in path.name and frame.lineno is not None
            if is_model and not any(folder in path.parents for folder in _NOT_THE_MODELS):
                text = linecache.getline(frame.filename, frame.lineno or 0).strip()
                return f", at {path.name}:{frame.lineno} ({text})"
        error = error.__cause__ or error.__context__
    return ""
