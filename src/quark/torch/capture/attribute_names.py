"""Names of a model's modules and parameters that a network has for something else.

A network has properties and folders of its own (`plan`, `config`, `quantizers`): a model's attribute of that name gets
an underscore behind it. What the tracer itself cannot hold, a Python keyword or an attribute of its graph modules, is
refused: the model has to call it something else. Patterns of a configuration go by the model's own names in any case.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection

from torch import fx, nn

from quark.errors import ModelError
from quark.torch.train.networks import QUANTIZERS, FrozenNetwork, QuantizedNetwork

_FOLDERS = (QUANTIZERS, "dropouts")


def free_name(path: str, taken: Collection[str]) -> str:
    """The path that an attribute has in a network; `taken` are those of the model.

    >>> free_name("plan.0.weight", ["plan.0.weight"]), free_name("features.0.weight", ["features.0.weight"])
    ('plan_.0.weight', 'features.0.weight')
    """
    first, *rest = path.split(".")
    if not _is_ours(first):
        return path
    others = {each.partition(".")[0] for each in taken}
    while first in others or _is_ours(first):
        first += "_"
    return ".".join((first, *rest))


def refuse_names(model: nn.Module) -> None:
    """A ModelError for the first module, parameter or buffer whose name a graph module cannot hold."""
    names = [name for kind in (model.named_modules, model.named_parameters, model.named_buffers) for name, _ in kind()]
    for name in names:
        first, *rest = name.split(".")
        is_held = hasattr(fx.GraphModule, first) or first == "meta"
        if (is_held and not hasattr(nn.Module, first)) or any(map(keyword.iskeyword, (first, *rest))):
            raise ModelError(
                f"{type(model).__name__} has '{name}', a name that torch's graph modules cannot hold: give it another "
                "one in the model's code (and in its state_dict), such as with an underscore behind it"
            )


def _is_ours(name: str) -> bool:
    return name in _FOLDERS or any(hasattr(kind, name) for kind in (QuantizedNetwork, FrozenNetwork))
