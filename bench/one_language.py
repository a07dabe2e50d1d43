"""A language model, quantized by ours or by AMD Quark, and its perplexity; alone in its process.

    python -I one_language.py JOB

JOB is JSON: who (float, ours or amd-quark), model (a folder for transformers), calibration and evaluation (.npy files
of token ids [windows, tokens]), samples and windows (how many of them are used), layer (input_tensors and weight, each
the name and the arguments of a spec class), algorithms (names and arguments of config classes), exclude, device (cpu
or cuda), and result.

Both packages have the same classes under `quark.torch`, so the code is the same. It runs in the environment of whoever
is measured, and nothing of this folder is imported. The clock runs while the module is quantized. The size is that of
the safetensors files that the package writes in its default layout; `save_error` says why there are none.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

Job = dict[str, Any]


def config_of(job: Job) -> Any:
    """Return the configuration that the job describes, made of the installed package's classes."""
    from quark.torch.quantization.config import config as classes

    def made(description: list[Any]) -> Any:
        name, arguments = description
        return getattr(classes, name)(**arguments)

    specs = {place: made(each).to_quantization_spec() for place, each in job["layer"].items()}
    return classes.Config(
        global_quant_config=classes.QLayerConfig(**specs),
        algo_config=[made(each) for each in job["algorithms"]] or (None if job["who"] == "amd-quark" else []),
        exclude=job["exclude"],
    )


def quantize(model: Any, job: Job, samples: list[Any]) -> Any:
    from quark.torch import ModelQuantizer

    quantizer = ModelQuantizer(config_of(job))
    quantized = quantizer.quantize_model(model, samples)
    # AMD Quark rounds the weights in every call until they are frozen
    return quantizer.freeze(quantized) if job["who"] == "amd-quark" else quantized


def perplexity(model: Any, windows: np.ndarray[Any, Any], device: str = "cpu") -> float:
    """Return exp of the mean loss of all tokens but the first of each window, given those before it."""
    import torch

    losses = []
    with torch.no_grad():
        for window in torch.from_numpy(windows).to(device):
            logits = model(window[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), window[1:]).item())
    return math.exp(sum(losses) / len(losses))


def saved_megabytes(model: Any, job: Job) -> float:
    """Return the size of the weights on the disk; quantized ones are written for it."""
    folder = Path(job["model"])
    if job["who"] != "float":
        from quark.torch import export_safetensors

        folder = Path.cwd() / "saved"
        export_safetensors(model, folder)
    return sum(each.stat().st_size for each in folder.glob("*.safetensors")) / 1e6


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    job: Job = json.loads(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval().to(job["device"])
    samples = [torch.from_numpy(each[None]).to(job["device"]) for each in np.load(job["calibration"])[: job["samples"]]]
    begin = time.perf_counter()
    if job["who"] != "float":
        model = quantize(model, job, samples)
    seconds = time.perf_counter() - begin
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    found = perplexity(model, np.load(job["evaluation"])[: job["windows"]], job["device"])
    result: Job = {"seconds": seconds, "peak_mb": peak_mb, "perplexity": found}
    try:
        result["file_mb"] = saved_megabytes(model, job)
    except Exception as error:  # the perplexity is worth having anyway
        result["save_error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
