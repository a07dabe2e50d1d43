"""From a model to an exported program: what the model computes, as a graph of aten operators.

The batch stays free: with a batch of 1 torch's tracer would take the 1 for a property of the model, so that such an
example is repeated to 2.
"""

from __future__ import annotations

import inspect
import linecache
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

from quark.errors import ModelError

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[1]  # what led to the error is the model's code, not the steps of this road


def export_for_training(
    model: nn.Module,
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
) -> ExportedProgram:
    """The model as an exported program, on any version of torch. The model keeps its mode and is not changed.

    `dynamic_batch`: the first axis of every tensor that is as long there as the first one's is left free. Where the
    model fixes it, it stays fixed, with a warning that says so.

    >>> program = export_for_training(nn.Linear(4, 2), (torch.rand(1, 4),))
    >>> program.module()(torch.rand(7, 4)).shape
    torch.Size([7, 2])
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"export_for_training: expected a torch.nn.Module, got {type(model).__name__}")
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    named = dict(kwargs or {})
    with _in_eval_mode(model):
        if not dynamic_batch:
            return _export(model, arguments, named, None)
        batch = _batch_of((arguments, named))
        if batch is None:
            return _export(model, arguments, named, None)
        longer, longer_named = pytree.tree_map(lambda each: _repeated(each, batch), (arguments, named))
        shapes = pytree.tree_map(lambda each: _free(each, batch), (arguments, named))
        program = _export(model, longer, longer_named, shapes)
        if _is_free(program) or batch != 1:
            return program
        warnings.warn(f"{type(model).__name__} fixes its batch: it was exported for a batch of {batch}", stacklevel=2)
        return _export(model, arguments, named, None)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    free = None if shapes is None else _shapes_by_name(model, *shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=free, strict=False)
        except Exception as error:
            raise ModelError(why_not_run(model, args, kwargs) or _why(model, error)) from error


def _shapes_by_name(model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What is free, by the parameters of the model's forward; those behind a star are one."""
    try:
        return dict(inspect.signature(model.forward).bind(*positional, **named).arguments)
    except TypeError as error:
        raise ModelError(
            f"{type(model).__name__} takes {inspect.signature(model.forward)}, and the example has {len(positional)} "
            f"positional arguments and {', '.join(named) or 'none'} by name: {error}"
        ) from error


def _batch_of(values: Any) -> int | None:
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return None


def _repeated(value: Any, batch: int) -> Any:
    if batch != 1 or not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != 1:
        return value
    return value.repeat(2, *[1] * (value.dim() - 1))


def _free(value: Any, batch: int) -> Any:
    has_batch = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch
    return {0: Dim.AUTO} if has_batch else None


def _is_free(program: ExportedProgram) -> bool:
    """That the program takes batches of any length."""
    inputs = set(program.graph_signature.user_inputs)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    return any(
        isinstance(size, torch.SymInt)
        for node in placeholders
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape[:1]
    )


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
    """What stops the model itself, where the tracer is not to blame; else nothing."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        given = [*map(_described, args), *(f"{name}={_described(each)}" for name, each in kwargs.items())]
        place = _place(error)
        return (
            f"{type(model).__name__} does not run on {', '.join(given)}{f', at {place}' if place else ''}: "
            f"{type(error).__name__}: {_first_line(error)}. Look at the shapes, types and devices of what it is given, "
            "and of its parameters"
        )
    return ""


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300].rstrip(".")


def _why(model: nn.Module, error: Exception) -> str:
    """What stopped the tracer, at which line of the model, and what to do."""
    place = _place(error)
    what = (
        f"{type(model).__name__} cannot be captured as a graph{f', at {place}' if place else ''}: "
        f"{type(error).__name__}: {_first_line(error)}. "
    )
    if "not a known type" in str(error) or "register a pytree" in str(error):
        return f"{what}Let it take and return tensors, tuples or dictionaries, or torch.export.register_dataclass(...)"
    return (
        f"{what}A graph has no branches or loops that depend on values: compute with torch.where or torch.cond there, "
        "move that part out of the model, or export the model to ONNX with whatever tool it has and quantize that file "
        "with quark.onnx, which leaves control flow in float"
    )


def _place(error: BaseException | None) -> str:
    """The last line of code outside of torch that led to the error, or to what caused it."""
    found = ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            path = Path(frame.filename)
            if _TORCH in path.parents or _OURS in path.parents or not path.is_file():
                continue
            if "contextlib" in path.name or frame.lineno is None:
                continue
            text = linecache.getline(frame.filename, frame.lineno).strip()
            found = f"{path.name}:{frame.lineno} ({text})"
        if found:
            return found
        error = error.__cause__ or error.__context__
    return found
