"""The processes of a run started by torchrun, on one machine or several.

All communication goes through here. Without torchrun there is one process, and nothing is sent.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import distributed

from quark.errors import InvalidValueError

Value = TypeVar("Value")
AUTO = "auto"


@dataclass(frozen=True)
class Processes:
    """This process is number `rank` of `count`, and computes on `device`."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        return self.count > 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes, in float64."""
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.are_many:
            distributed.all_reduce(total)
        return [float(number) for number in total.tolist()]

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        if not self.are_many:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def of_first(self, value: Value) -> Value:
        """Return the value of the first process; those of the others are ignored."""
        if not self.are_many:
            return value
        values: list[Any] = [value]
        distributed.broadcast_object_list(values, src=0, device=self.device)
        return values[0]  # type: ignore[no-any-return]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in place."""
        if not self.are_many or not tensors:
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        distributed.all_reduce(flat)
        flat /= self.count
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    def follow_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace the tensors by those of the first process, in place."""
        if self.are_many:
            for tensor in tensors:
                distributed.broadcast(tensor.detach(), src=0)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.are_many:
            distributed.barrier()


def choose_device(name: str = AUTO) -> torch.device:
    """Return the device called `name`; `auto` is CUDA if available. An unavailable device is an error."""
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidValueError(f"device '{name}': expected auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        devices = f"torch {torch.__version__} sees {count} CUDA devices" if count else "torch sees no CUDA device here"
        raise InvalidValueError(f"device '{name}': {devices}; use cpu, or a torch built for CUDA and its driver")
    if device.type not in ("cpu", "cuda"):
        raise InvalidValueError(f"device '{name}': expected auto, cpu, cuda or cuda:0")
    return device


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Connect the processes that torchrun started: by NCCL on CUDA, by Gloo on the CPU."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or distributed.is_initialized():
        yield current_processes(device)
        return
    if device.type == "cuda":
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    is_cuda = device.type == "cuda"
    distributed.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    try:
        yield current_processes(device)
    finally:
        # DistributedDataParallel is part of a reference cycle: if it lives on, so do the threads of the group, and a
        # process that ends before them is aborted
        gc.collect()
        distributed.destroy_process_group()
        gc.collect()


def current_processes(device: torch.device) -> Processes:
    """Return this process and the number of processes, joined or not."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Processes(device=device)
    return Processes(distributed.get_rank(), distributed.get_world_size(), device)
