"""The signature of a model: the parameters of its forward, and those that a captured network takes.

A network keeps the signature of its model. What it was captured with is fixed: an argument that held a tensor has to be
given at every call, and one that held none has to keep the value that it had. Calls that differ are refused by name,
since the graph cannot follow them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from quark.errors import InvalidValueError, ModelError

PLAIN = (bool, int, float, str, type(None))  # arguments other than tensors that a graph is captured for


@dataclass(frozen=True)
class CallSignature:
    """The parameters of a forward. `defaults` has the optional ones; `takes_others`: it ends in **kwargs."""

    by_position: tuple[str, ...]
    by_name: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    takes_others: bool = False
    python: inspect.Signature | None = None  # None for programs, which have no forward of their own

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.by_position, *self.by_name)

    @property
    def required(self) -> list[str]:
        """The inputs without which the model does not run; the first one if it runs without any."""
        names = [name for name in self.names if name not in self.defaults]
        return names or list(self.names[:1])


def signature_of(model: nn.Module | ExportedProgram) -> CallSignature:
    """Return how the model is called; a ModelError says what is not a model."""
    if isinstance(model, ExportedProgram):
        return CallSignature(tuple(str(name) for name in model.graph_signature.user_inputs))
    if isinstance(model, fx.GraphModule):
        return CallSignature(tuple(str(node.target) for node in model.graph.nodes if node.op == "placeholder"))
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"the model is a {type(model).__name__} of torch.jit, whose operators torch.export does not see: pass the "
            "module that was traced or scripted"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, an exported program or its module, got {type(model).__name__}; ONNX files go "
            "to quark.onnx"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]  # annotations may be anything
    by_position = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    by_name = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
    }
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters) and not by_position
    return CallSignature(
        ("x",) if takes_any else tuple(by_position),
        tuple(by_name),
        defaults,
        takes_others,
        None if takes_any else inspect.Signature(plain),
    )


@dataclass(frozen=True)
class Call:
    """A call that a network is captured for: the parameters that hold tensors, in the order of the signature, and the
    plain values of others."""

    signature: CallSignature
    names: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        return self

    def split(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tensors, in the order of `names`, as arguments by position and by name. Those behind a parameter
        that is left out are passed by name."""
        leading = 0
        places = zip(self.names, self.signature.by_position, strict=False)
        while leading < len(self.names) and next(places, ("", None)) == (self.names[leading],) * 2:
            leading += 1
        return tuple(tensors[:leading]), dict(zip(self.names[leading:], tensors[leading:], strict=True))

    def tensors(self, arguments: tuple[Any, ...], by_name: Mapping[str, Any]) -> list[Any]:
        """Return the values of `names` in a call with these arguments; an InvalidValueError says what does not fit."""
        signature = self.signature
        if len(arguments) > len(signature.by_position):
            raise InvalidValueError(
                f"the network takes {len(signature.by_position)} arguments by position, {len(arguments)} were given"
            )
        given = dict(zip(signature.by_position, arguments, strict=False))
        for name, value in by_name.items():
            if name in given:
                raise InvalidValueError(f"the network was given '{name}' twice, by position and by name")
            if name not in signature.names and not signature.takes_others:
                raise InvalidValueError(
                    f"the network takes no argument '{name}'; it takes {', '.join(signature.names)}"
                )
            given[name] = value
        for name, value in given.items():
            if name not in self.names:
                self._check_constant(name, value)
        missing = [name for name in self.names if given.get(name) is None]
        if missing:
            raise InvalidValueError(
                f"the network was captured with {', '.join(self.names)}, and this call lacks {', '.join(missing)}: "
                "pass it, or quantize the model with batches that do not hold it"
            )
        return [given[name] for name in self.names]

    def _check_constant(self, name: str, value: Any) -> None:
        expected = self.constants.get(name, self.signature.defaults.get(name))
        if isinstance(value, torch.Tensor):
            raise InvalidValueError(
                f"the network was captured without '{name}', so it cannot use it: quantize the model with batches that "
                "hold it (labels are left out of calibration: compute the loss from the outputs)"
            )
        if value is not None and not (type(value) is type(expected) and value == expected):
            raise InvalidValueError(
                f"the network was captured with {name}={expected!r}, and cannot be called with {value!r}: quantize the "
                f"model with batches that hold '{name}': {value!r}"
            )
