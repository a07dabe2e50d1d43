"""Schedules that freeze batch norms and scales, in the loops of others."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch_networks import images, trained

from quark.errors import InvalidValueError, ModelError
from quark.torch import ModelQuantizer, QuantizationCallback, simulate_runtime
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer import LSQObserver

torch.set_num_threads(1)


def _quantized() -> Any:
    learned, followed = QuantizationSpec(Dtype.int8, LSQObserver), QuantizationSpec(Dtype.int8)
    return ModelQuantizer(Config(QuantizationConfig(learned, learned, followed))).quantize_model(
        trained("resnet"), [images()]
    )


def _numbers(quantized: Any, ending: str) -> list[torch.Tensor]:
    return [each.clone() for name, each in quantized.state_dict().items() if name.endswith(ending)]


def _are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _step(model: nn.Module, quantized: Any) -> None:
    optimizer = torch.optim.SGD([parameter for parameter in quantized.parameters() if parameter.requires_grad], lr=1e-4)
    model.train()(images()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Lightning:
    """Calls hooks as Lightning's trainer does."""

    def __init__(self, callback: Any) -> None:
        self.callbacks = [callback]
        self.global_step, self.estimated_stepping_batches = 0, 4

    def fit(self, module: nn.Module, quantized: Any) -> None:
        for callback in self.callbacks:
            callback.setup(self, module, stage="fit")
            callback.on_fit_start(self, module)
        for number in range(4):
            self.global_step = number
            for callback in self.callbacks:
                callback.on_train_batch_start(self, module, images(), number)
            _step(module, quantized)
            for callback in self.callbacks:
                callback.on_train_batch_end(self, module, None, images(), number)
                assert callback.state_dict() == {}
                assert callback.state_key == callback._legacy_state_key == "QuantizationCallback"


class HuggingFace:
    """Calls hooks as the trainer of transformers does; its training_step calls train() every time."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def fit(self, module: nn.Module, quantized: Any) -> None:
        for number in range(4):
            state = SimpleNamespace(global_step=number, max_steps=4)
            for hook in ("on_step_begin", "on_substep_end", "on_step_end"):
                getattr(self.callback, hook)(None, state, None, model=module, optimizer=None)
                if hook == "on_step_begin":
                    _step(module, quantized)


@pytest.mark.parametrize("is_simulated", [False, True])
def test_the_trainer_of_hugging_face_takes_nothing_for_its_own(is_simulated: bool) -> None:
    quantized = _quantized()
    module = simulate_runtime(quantized) if is_simulated else quantized
    assert getattr(module, "config", None) is None  # it would set `config.use_cache`
    assert module.accepts_loss_kwargs is False  # it would call the network with `num_items_in_batch`


@pytest.mark.parametrize("loop", [Lightning, HuggingFace])
@pytest.mark.parametrize("is_simulated", [False, True])
def test_what_is_frozen_stays_as_it_is(loop: Any, is_simulated: bool) -> None:
    quantized = _quantized()
    module = nn.Sequential(simulate_runtime(quantized) if is_simulated else quantized)
    loop(QuantizationCallback(freeze_batch_norms_at=0, freeze_scales_at=None)).fit(module, quantized)
    means, scales = _numbers(quantized, "running_mean"), _numbers(quantized, "scale")
    weights = _numbers(quantized, "conv1.weight")
    loop(QuantizationCallback(freeze_batch_norms_at=None, freeze_scales_at=0)).fit(module, quantized)
    assert _are_equal(means, _numbers(quantized, "running_mean"))
    assert _are_equal(scales, _numbers(quantized, "scale"))
    assert not _are_equal(weights, _numbers(quantized, "conv1.weight"))


def test_before_its_time_nothing_is_frozen_and_train_undoes_what_was_not_for_good() -> None:
    quantized = _quantized().train()
    assert QuantizationCallback(freeze_batch_norms_at=0.5, freeze_scales_at=0.5).update(quantized, 0.4) == ()
    quantized.freeze_scales()
    quantized.freeze_batch_norms()
    means, scales = _numbers(quantized, "running_mean"), _numbers(quantized, "scale")
    quantized(images())
    assert _are_equal(means, _numbers(quantized, "running_mean"))
    _step(quantized, quantized)  # calls train()
    assert not _are_equal(means, _numbers(quantized, "running_mean"))
    assert not _are_equal(scales, _numbers(quantized, "scale"))


def test_copies_and_pickles_stay_frozen() -> None:
    quantized = _quantized().train()
    QuantizationCallback(freeze_batch_norms_at=0).update(quantized, 0)
    for other in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        means = _numbers(other, "running_mean")
        other.train()(images())
        assert _are_equal(means, _numbers(other, "running_mean"))


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidValueError, match=r"freeze_scales_at 2: expected a share of training from 0 to 1"):
        QuantizationCallback(freeze_scales_at=2)
    with pytest.raises(ModelError, match="holds nothing that ModelQuantizer"):
        QuantizationCallback().update(nn.Linear(2, 2), 0.0)
    with pytest.raises(AttributeError, match="'QuantizationCallback' object has no attribute 'steps'"):
        _ = QuantizationCallback().steps
