"""A block of a network is fitted to whole activations of the float network, from those of the quantized one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from blocks_of_layers import quantized, quantized_copy
from onnx_models import Net

from quark.features.finetuning.block_fitting import BlockFitter
from quark.features.finetuning.options import Algorithm, FinetuneOptions, FitOptions
from quark.features.finetuning.walk import Walk
from quark.onnx.data.samples import SampleStore

SAMPLES = 12
FIT = FitOptions(Algorithm.ADAQUANT, iterations=60, learning_rate=None, batch_rows=256)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(op_type="Relu"):
    """A residual block behind a layer; its output is also one of the network."""
    net = Net()
    x = net.conv(net.input("x", (1, 4, 6, 6)), (4, 4), name="stem", output="begin")
    y = net.node(op_type, net.conv(x, (4, 8), pads=[1] * 4, name="first"))
    x = net.node("Add", net.conv(y, (8, 4), 1, name="second"), x, name="join", output="end")
    return net.model(net.conv(x, (4, 3), 1, name="head"), x)


def fitter(proto, fit=FIT, count=SAMPLES, memory_limit=1 << 20):
    found = quantized(proto, bits=4)
    random = np.random.default_rng(0)
    samples = [{"x": random.normal(0, 0.3, (1, 4, 6, 6)).astype(np.float32)} for _ in range(count)]
    float_walk, quantized_walk = (
        Walk(model, samples, SampleStore) for model in (found.model.clone(), quantized_copy(found))
    )
    options = FinetuneOptions(fit, memory_limit=memory_limit)
    stores = []

    def make_store():
        stores.append(SampleStore(memory_limit))
        return stores[-1]

    made = BlockFitter(found.model, found.choices, float_walk, quantized_walk, count, make_store, options, {})
    block = next(block for block in found.blocks if block.output == "end")
    return made, block, stores


@pytest.mark.parametrize("memory_limit", [1 << 20, 0])
def test_the_layers_of_a_block_get_better_together(memory_limit):
    made, block, stores = fitter(network(), memory_limit=memory_limit)
    assert [layer.name for layer in block.layers] == ["first", "second"]
    assert made.why_not(block) is None
    fitted = made.fit(block, 1)
    assert all(each.error_after < 0.95 * each.error_before for each in fitted)
    assert [each.weight.shape for each in fitted] == [(8, 4, 3, 3), (4, 8, 1, 1)]
    assert [len(store) for store in stores] == [0, 0], "all are closed"


def test_memory_does_not_change_the_weights():
    weights = []
    for memory_limit in (1 << 20, 0):
        made, block, _ = fitter(network(), replace(FIT, drop_ratio=0.5), memory_limit=memory_limit)
        weights.append([each.weight.tobytes() for each in made.fit(block, 1)])
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("proto", "count", "word"), [(network("Softplus"), SAMPLES, "Softplus"), (network(), 1, "sample")]
)
def test_what_cannot_be_fitted_together_says_why(proto, count, word):
    made, block, _ = fitter(proto, count=count)
    assert word in made.why_not(block)


def test_a_tensor_that_the_float_network_does_not_have_is_no_target():
    made, block, _ = fitter(network())
    assert "elsewhere" in made.why_not(replace(block, output="elsewhere"))
