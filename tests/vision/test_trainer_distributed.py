"""Two processes over Gloo, as torchrun starts them: one network, and what one process would have made of it."""

import os
import socket
from pathlib import Path

import pytest
import torch
from tiny_training import state_differences, tiny_data, tiny_network, tiny_options
from torch.multiprocessing.spawn import spawn

from quark.vision.tensor_file import load_checkpoint
from quark.vision.training import Trainer, evaluate_module, joined

OPTIONS = tiny_options(epochs=2, learning_rate=0.05, average_decay=0.9, seed=1)
KINDS = {"plain": False, "batch_norm": True}


def train_parts(rank, port, folder):
    """One of the two processes; the environment is what torchrun sets. Starting them takes longest: both networks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0")
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as processes:
        for name, has_batch_norm in KINDS.items():
            # other weights in the second process, and no disk that both see: those of the first count
            model = tiny_network(seed=rank, has_batch_norm=has_batch_norm, dropout=0.0)
            data, held_out = tiny_data(batch_size=8, processes=processes)
            result = Trainer(model, OPTIONS, Path(folder) / f"{name}_{rank}", processes).train(data, held_out)
            content = {
                "model": model.state_dict(),
                "history": [(each.top1, each.top5, each.loss) for each in result.history],
                "best": torch.from_numpy(evaluate_module(model, held_out, processes).best),
            }
            torch.save(content, Path(folder) / f"{name}_{rank}.pt")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("processes")
    spawn(train_parts, (free_port(), str(found)), nprocs=2)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_two_processes_have_one_network_and_the_same_figures(folder, name):
    first, second = (torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(2))
    assert state_differences(first["model"], second["model"]) == []
    assert first["history"] == second["history"]
    assert first["history"][-1][0] > first["history"][0][0]
    assert not (folder / f"{name}_1").exists()  # the first process writes


@pytest.mark.parametrize("name", KINDS)
def test_the_parts_of_both_come_together_in_the_order_of_the_data(folder, name):
    found = torch.load(folder / f"{name}_0.pt", weights_only=True)
    model = tiny_network(has_batch_norm=KINDS[name], dropout=0.0)
    model.load_state_dict(found["model"])
    alone = evaluate_module(model, tiny_data()[1])
    assert torch.equal(torch.from_numpy(alone.best)[:, 0], found["best"][:, 0])


def test_without_batch_norm_it_is_one_process_with_batches_of_both(folder, tmp_path):
    model = tiny_network(seed=0, has_batch_norm=False, dropout=0.0)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    Trainer(model, OPTIONS, tmp_path).train(*tiny_data(batch_size=16))
    expected, found = (load_checkpoint(run / "last.pt")["model"] for run in (tmp_path, folder / "plain_0"))
    assert sorted(state_differences(before, expected)) == sorted(before)
    for name, each in expected.items():
        assert torch.allclose(each, found[name], rtol=1e-4, atol=1e-6), name
