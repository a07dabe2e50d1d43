"""What the loop is made of: groups of parameters, the schedule, the average, paired scores."""

import itertools

import numpy as np
import pytest
import torch
from tiny_training import tiny_network
from torch import nn

from quark.plan import AffineChoice, Role
from quark.torch.train.parameters import sort_parameters
from quark.torch.train.quantizers import AffineQuantizer, LsqQuantizer, TqtQuantizer
from quark.vision.training import OptimizerName, Scores, TrainingOptions
from quark.vision.training.step import WeightAverage, make_optimizers, rate_factor, set_rates

START = AffineChoice("int8", (0.25,), (0,))


def quantized_network():
    model = nn.Module()
    model.layer, model.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
    model.quantizers = nn.ModuleDict(
        {"x": TqtQuantizer("x", Role.ACTIVATION, START), "y": LsqQuantizer("y", Role.ACTIVATION, START)}
    )
    model.layer.weight_quantizer = AffineQuantizer("w", Role.WEIGHT, START, (2, 3))
    return model


def names_of(model, parameters):
    return {name for name, parameter in model.named_parameters() if any(parameter is other for other in parameters)}


def test_every_parameter_that_learns_is_in_one_group():
    model = quantized_network()
    kinds = sort_parameters(model)
    assert names_of(model, kinds.weights) == {"layer.weight"}
    assert names_of(model, kinds.plain) == {"layer.bias", "norm.weight", "norm.bias"}
    assert names_of(model, kinds.steps) == {"quantizers.y.scale"}
    assert names_of(model, kinds.thresholds) == {"quantizers.x.log2_threshold"}
    model.layer.weight.requires_grad_(False)
    assert sort_parameters(model).weights == []


@pytest.mark.parametrize("name", OptimizerName)
def test_thresholds_learn_by_adam_at_their_own_rate_and_nothing_but_weights_decays(name):
    options = TrainingOptions(
        optimizer=name, learning_rate=1e-3, threshold_learning_rate=0.05, weight_decay=0.3, seed=0
    )
    main, other = make_optimizers(quantized_network(), options)
    assert isinstance(other, torch.optim.Adam)
    assert [group["weight_decay"] for group in main.param_groups] == [0.3, 0.0, 0.0]
    assert [group["lr"] for group in main.param_groups] == [1e-3, 1e-3, 0.05]
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.05, 0.0)]
    set_rates([main, other], 0.5)
    set_rates([main, other], 0.5)
    assert main.param_groups[0]["lr"] == 5e-4


def test_a_float_network_has_one_optimizer():
    assert len(make_optimizers(tiny_network(), TrainingOptions())) == 1


def test_the_rate_rises_to_its_full_size_and_falls_to_almost_nothing():
    rates = [rate_factor(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([index / 10 for index in range(1, 11)])
    assert max(rates) == 1.0
    assert all(after < before for before, after in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert all(0 < rate_factor(step, 3, warmup) <= 1 for step in range(3) for warmup in (0, 0.3, 1))


def test_the_average_lies_between_states_and_scales_are_none_of_its_business():
    model = quantized_network()
    average = WeightAverage(model, decay=0.99)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        model.layer.weight += 1
        model.layer.weight_quantizer.scale.fill_(0.5)
    average.update(model)
    change = average.state["layer.weight"] - before["layer.weight"]
    assert torch.allclose(change, torch.full_like(change, 0.9), atol=1e-6)
    assert average.state["layer.weight_quantizer.scale"] == 0.5
    with average.in_place(model):
        assert torch.equal(model.layer.weight, average.state["layer.weight"])
    assert torch.equal(model.layer.weight, before["layer.weight"] + 1)


def test_scores_are_paired_sample_by_sample():
    labels = np.array([0, 1, 2, 3])
    first = Scores(np.array([[0, 9], [1, 9], [9, 2], [9, 8]]), labels)
    second = Scores(np.array([[0, 9], [9, 1], [2, 9], [7, 8]]), labels)
    pair = first.paired_with(second)
    assert (pair.gained, pair.lost, pair.first.top1, pair.second.top5) == (1, 1, 0.5, 0.75)
    assert first.agreement(second) == 0.25
