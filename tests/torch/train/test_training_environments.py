"""A quantized network trains wherever a module does: compiled, under autocast, checkpointed, in several processes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint
from torch_networks import images, trained
from torch_specs import settings

from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.torch.quantization.pipeline import quantize_network
from quark.torch.train.networks import QuantizedNetwork

NAMES = ["int8", "non-overflow", "tqt", "lsq", "mx6"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quantized(name: str, kind: str = "mobilenet") -> QuantizedNetwork:
    torch.manual_seed(0)
    network = quantize_network(trained(kind), [images(8)], settings(name)).train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}


def stepped(network: nn.Module, call: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network.zero_grad()
    out = (network if call is None else call)(images(8, seed=2))
    out.float().square().sum().backward()
    return out.detach(), gradients(network)


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= share * gradient.norm() + 1e-5, name


@pytest.mark.parametrize(
    "name", ["lsq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("non-overflow", "mx6"))]
)
def test_it_compiles_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    network = quantized(name)
    compiled = torch.compile(copy.deepcopy(network), backend="aot_eager", fullgraph=True)
    out, expected = stepped(network)
    found, gradient = stepped(compiled._orig_mod, compiled)  # type: ignore[attr-defined]
    assert (found - out).norm() <= 0.02 * out.norm()
    assert_alike(gradient, expected, 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_under_autocast(name: str) -> None:
    network = quantized(name)
    with torch.autocast("cpu", torch.bfloat16):
        out, gradient = stepped(network)
    assert out.isfinite().all()
    assert all(each.isfinite().all() for each in gradient.values())
    assert all(each.dtype is torch.float32 for each in gradient.values())


@pytest.mark.parametrize("name", ["int8", "tqt"])
def test_checkpointing_changes_nothing(name: str) -> None:
    network = quantized(name)
    plain = copy.deepcopy(network)
    out, expected = stepped(plain)
    found, gradient = stepped(network, lambda x: checkpoint(network, x, use_reentrant=False))
    assert torch.equal(found, out)
    assert_alike(gradient, expected, 1e-6)


def _in_process(rank: int, folder: str) -> None:
    """One of two processes: calibrates on its half of the data, then takes a step."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        _calibrate_and_step(rank, folder)
    finally:
        gc.collect()  # what trained in parallel would keep the group's threads, and a process that ends so is aborted
        distributed.destroy_process_group()


def _calibrate_and_step(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    half = images(8)[rank * 4 : rank * 4 + 4]
    network = quantize_network(trained("mobilenet"), [half], settings("tqt"))
    plan = network.plan.to_json()
    repaired = settings(
        "non-overflow",
        equalize=CrossLayerOptions(clip=ClipTreatment.CALIBRATED),
        correct_biases=TorchBiasCorrectionOptions(),
    )
    other = quantize_network(trained("mobilenet"), [half], repaired)
    network = nn.SyncBatchNorm.convert_sync_batchnorm(network) if torch.cuda.is_available() else network
    parallel = nn.parallel.DistributedDataParallel(network.train())
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(half).square().sum().backward()
        optimizer.step()
    content = {"plan": plan, "state": network.state_dict(), "repaired": other.state_dict()}
    torch.save(content, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_two_processes_agree_with_each_other_and_with_one(tmp_path: Path) -> None:
    spawn(_in_process, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["plan"] == second["plan"]
    for name, value in first["repaired"].items():
        assert torch.equal(value, second["repaired"][name]), name
    alone = quantize_network(trained("mobilenet"), [images(8)], settings("tqt"))
    assert first["plan"] == alone.plan.to_json()
    parameters = {name for name, _ in alone.named_parameters()}
    for name, value in first["state"].items():
        if name in parameters:
            assert torch.equal(value, second["state"][name]), name
