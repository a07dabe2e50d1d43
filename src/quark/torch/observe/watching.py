"""Run a network and look at what its nodes compute."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from quark.errors import ModelError
from quark.torch.graph import layer_name


class Watching(fx.Interpreter):
    """Runs a network node by node, and hands the value of each node of these names to `see`."""

    def __init__(
        self, network: fx.GraphModule, names: Collection[str], see: Callable[[str, torch.Tensor], None]
    ) -> None:
        super().__init__(network)
        self._names = frozenset(names)
        self._see = see
        self.extra_traceback = False
        self._device = next((each.device for each in network.parameters()), torch.device("cpu"))

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ModelError(
                f"node '{n.name}' of {layer_name(n)} does not run on the calibration data: {error}. Look at the shapes "
                "of the batches; a model that was exported for one batch size only takes others when it is exported "
                "with quark.torch.export_for_training"
            ) from error
        if n.name in self._names:
            self._see(n.name, value.detach())
        return value

    def over(self, batch: tuple[torch.Tensor, ...]) -> Any:
        """The outputs for one batch, without gradients."""
        with torch.no_grad():
            return self.run(*(each.to(self._device) for each in batch), enable_io_processing=False)
