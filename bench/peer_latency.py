"""Latency of a quantized model as a multiple of the float model, both in the peer's environment, with its operators.

    python -I peer_latency.py JOB

JOB is JSON: float, quantized and samples (paths), input_name, threads, turns, seconds, result (the file to write).

Run by the peer's interpreter; nothing of this folder is imported. The two take turns, as with ours.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from quark.onnx import get_library_path

SETTLE_SECONDS = 0.005


def open_session(path: str, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    job = json.loads(sys.argv[1])
    feeds = {job["input_name"]: np.array(np.load(job["samples"], mmap_mode="r")[:1])}
    sessions = {name: open_session(job[name], job["threads"]) for name in ("float", "quantized")}
    for session in sessions.values():
        session.run(None, feeds)
    samples: dict[str, list[float]] = {name: [] for name in sessions}
    start, rounds = time.perf_counter(), 0
    while rounds < job["turns"] or (time.perf_counter() - start < job["seconds"] and rounds < 20 * job["turns"]):
        for name, session in sessions.items():
            time.sleep(SETTLE_SECONDS)
            session.run(None, feeds)
            begin = time.perf_counter()
            session.run(None, feeds)
            samples[name].append(time.perf_counter() - begin)
        rounds += 1
    Path(job["result"]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
