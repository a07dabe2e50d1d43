"""What a benchmark of the torch side runs on, in words."""

from __future__ import annotations

import torch


def describe_device(device: str | torch.device) -> str:
    """The GPU by its name, or the number of threads on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"the CPU, {torch.get_num_threads()} threads"
