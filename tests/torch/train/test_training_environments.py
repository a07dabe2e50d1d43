"""A quantized network trains wherever a module does: compiled, under autocast, checkpointed, in several processes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint
from torch_networks import images, trained
from torch_specs import settings

from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.torch.quantization.pipeline import quantize_network
from quark.torch.train.networks import QuantizedNetwork
from quark.torch.train.sharding import fully_shard

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
    return {
        name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None
    }


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


def _three_steps(network: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()


def _perceptron() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return quantize_network(model, [_rows()], settings("lsq"))


def _rows() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def _in_shards(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/shards", rank=rank, world_size=2)
    try:
        own = _rows()[rank * 4 : rank * 4 + 4]
        for name, rows in (("same", _rows()), ("own", own)):
            network = fully_shard(_perceptron().train(), mesh=init_device_mesh("cpu", (2,)))
            _three_steps(network, rows)
            state = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True))
            torch.save({key: value.clone() for key, value in state.items()}, f"{folder}/{name}{rank}.pt")
    finally:
        gc.collect()
        distributed.destroy_process_group()


@pytest.mark.slow
def test_shards_learn_what_one_process_learns(tmp_path: Path) -> None:
    spawn(_in_shards, (str(tmp_path),), nprocs=2)
    alone = _perceptron().train()
    _three_steps(alone, _rows())
    same, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("same1", "own0", "own1"))
    is_learned = 0
    for name, value in alone.state_dict().items():
        assert torch.allclose(value, same[name], atol=1e-6), name
        if name in second:  # the first process has what was gathered; what is not sharded is in both
            assert torch.equal(first[name], second[name]), name
            is_learned += value.dim() == 0
    assert is_learned
