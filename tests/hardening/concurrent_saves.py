"""Save different results under one name from several processes at the same time, and look at what is left.

    python concurrent_saves.py FOLDER [--saves N] [--processes P] [--seed S]

Each trial lets every process save a result of its own, with weights beside it, to the same OUT. In the end the model
must name weights that are there, the report must be the one of this model, and nothing else may be in the folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import time
from pathlib import Path

import numpy as np
import onnx

from quark.demo import network_path
from quark.onnx import get_default_config, quantize
from quark.onnx.quantization.reproduction import external_files, file_hash

PRESETS = ("XINT8", "BF16", "A8W8", "MXINT8")


def save_in_turn(number: int, folder: Path, trials: int, seed: int, barrier) -> None:
    config = get_default_config(PRESETS[number % len(PRESETS)])
    config.use_external_data_format = True
    samples = np.random.default_rng(number).random((2, 1, 8, 8), dtype=np.float32)
    result = quantize(network_path(), samples, config)
    chance = random.Random(seed * 1000 + number)
    for _ in range(trials):
        barrier.wait()  # the folder is empty
        time.sleep(chance.uniform(0, 0.01))
        result.save(folder / "out.onnx")
        barrier.wait()  # all have saved; the folder is looked at
        barrier.wait()


def fault(folder: Path) -> str:
    """What is wrong with the result, or nothing."""
    model, report = folder / "out.onnx", folder / "out.json"
    try:
        weights = external_files(model)
        onnx.load(model)
        if json.loads(report.read_text())["result"]["sha256"] != file_hash(model):
            return "model and report come from different runs"
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    left = sorted(each.name for each in folder.iterdir() if each not in (model, report, *weights))
    return f"left over: {left}" if left else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder / "out"
    trials = arguments.saves // arguments.processes
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(arguments.processes + 1, timeout=300)
    workers = [
        context.Process(target=save_in_turn, args=(number, folder, trials, arguments.seed, barrier), daemon=True)
        for number in range(arguments.processes)
    ]
    for worker in workers:
        worker.start()
    faults = []
    for _ in range(trials):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        barrier.wait()
        barrier.wait()
        faults += [found] if (found := fault(folder)) else []
        barrier.wait()
    for worker in workers:
        worker.join()
    if faults:
        raise SystemExit(f"{len(faults)} of {trials} trials went wrong, such as: {faults[0]}")
    print(f"{trials * arguments.processes} saves by {arguments.processes} processes: no fault")


if __name__ == "__main__":
    main()
