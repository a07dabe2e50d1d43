"""Paths that scripts for language models import from."""

from __future__ import annotations

from functools import reduce
from typing import Any, NoReturn

from torch import nn

from quark.errors import UnsupportedOptionError


def getattr_recursive(obj: Any, name: str) -> Any:
    """Return the attribute at a path such as "layers.0.fc"."""
    return reduce(getattr, name.split("."), obj)


def setattr_recursive(module: nn.Module, name: str, value: Any) -> None:
    """Set the attribute at a path such as "layers.0.fc"."""
    parent, _, last = name.rpartition(".")
    setattr(getattr_recursive(module, parent) if parent else module, last, value)


class TPDeviceManager:
    """Tensor parallelism, which is not carried out: models are evaluated on one device."""

    _tp_mesh = None
    _device = None

    @classmethod
    def tp_mesh_init(cls) -> NoReturn:
        raise UnsupportedOptionError("use_tp: models are evaluated on one device; leave it out")

    @classmethod
    def tp_cleanup(cls) -> None:
        """Nothing was started."""
