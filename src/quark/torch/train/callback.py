"""Freeze batch norms and scales during training, in anyone's training loop.

Lightning and the Trainer of Hugging Face call their callbacks by name and need no base class, so one object serves
both, and neither package is imported. Hooks that do nothing here are answered by one that does nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.errors import InvalidValueError, ModelError
from quark.torch.runtime import RuntimeNetwork
from quark.torch.train.networks import QuantizedNetwork

_HOOKS = ("setup", "teardown", "load_state_dict")


class QuantizationCallback:
    """Freezes the batch norms and the scales of a quantized network at a share of training, from 0 to 1; None never.

    Late in training, statistics of single batches and scales that still move are noise that the frozen network does
    not have. Hand it to `callbacks=` of a Lightning or Hugging Face Trainer, or call `update` in a loop of your own.
    The network may be part of a larger module. A resumed run freezes again what was frozen, at its first step.

    >>> import torch
    >>> from quark.torch import ModelQuantizer
    >>> from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    >>> from quark.torch.quantization.config.type import Dtype
    >>> config = Config(QuantizationConfig(weight=QuantizationSpec(Dtype.int8)))
    >>> quantized = ModelQuantizer(config).quantize_model(nn.Linear(8, 2), [torch.rand(4, 8)]).train()
    >>> callback = QuantizationCallback(freeze_batch_norms_at=0.5, freeze_scales_at=0.75)
    >>> [callback.update(quantized, step / 4) for step in range(4)]
    [(), (), ('batch norms',), ('batch norms', 'scales')]
    """

    def __init__(self, *, freeze_batch_norms_at: float | None = 0.5, freeze_scales_at: float | None = None) -> None:
        for name, share in (("freeze_batch_norms_at", freeze_batch_norms_at), ("freeze_scales_at", freeze_scales_at)):
            if share is not None and not 0 <= share <= 1:
                raise InvalidValueError(f"{name} {share}: expected a share of training from 0 to 1, or None")
        self.freeze_batch_norms_at = freeze_batch_norms_at
        self.freeze_scales_at = freeze_scales_at

    def update(self, model: nn.Module, progress: float) -> tuple[str, ...]:
        """Freeze what is due at that share of training, and return what is frozen."""
        network = _network_in(model)
        frozen = []
        if self.freeze_batch_norms_at is not None and progress >= self.freeze_batch_norms_at:
            network.freeze_batch_norms(is_lasting=True)
            frozen.append("batch norms")
        if self.freeze_scales_at is not None and progress >= self.freeze_scales_at:
            network.freeze_scales(is_lasting=True)
            frozen.append("scales")
        return tuple(frozen)

    # ---- Lightning ----
    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints."""
        return type(self).__name__

    _legacy_state_key = state_key  # the key that Lightning looks for in checkpoints without `state_key`

    def state_dict(self) -> dict[str, Any]:
        """Empty, because the frozen state follows from the progress."""
        return {}

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, *batch: Any) -> None:
        """Called by Lightning before every step."""
        self.update(pl_module, trainer.global_step / max(trainer.estimated_stepping_batches, 1))

    # ---- Hugging Face ----
    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any) -> None:
        """Called by the Trainer of Hugging Face before every step."""
        self.update(model, state.global_step / max(state.max_steps, 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in _HOOKS:
            return _do_nothing
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def _do_nothing(*arguments: Any, **by_name: Any) -> None:
    """A placeholder for hooks that are not needed."""


def _network_in(model: nn.Module) -> QuantizedNetwork:
    for module in model.modules():
        network = module.network if isinstance(module, RuntimeNetwork) else module
        if isinstance(network, QuantizedNetwork):
            return network
    raise ModelError(
        f"QuantizationCallback: {type(model).__name__} holds nothing that ModelQuantizer.quantize_model returned; "
        "quantize the network before training, and do not freeze it yet"
    )
