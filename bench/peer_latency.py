"""Latency of a quantized model as a multiple of the float model, both in a peer's environment, with its operators.

    python -I peer_latency.py JOB

JOB is JSON: float, quantized and samples (paths), threads, turns, seconds, has_operators (whether the peer
has a library of them), result (the file to write).

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

SETTLE_SECONDS = 0.005


def open_session(path: str, threads: int, has_operators: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if has_operators:
        from quark.onnx import get_library_path

        options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    job = json.loads(sys.argv[1])
    sample = np.array(np.load(job["samples"], mmap_mode="r")[:1])
    names = ("float", "quantized")
    sessions = {name: open_session(job[name], job["threads"], job["has_operators"]) for name in names}
    # a peer may have renamed the input
    feeds = {name: {session.get_inputs()[0].name: sample} for name, session in sessions.items()}
    for name, session in sessions.items():
        session.run(None, feeds[name])
    samples: dict[str, list[float]] = {name: [] for name in sessions}
    start, rounds = time.perf_counter(), 0
    while rounds < job["turns"] or (time.perf_counter() - start < job["seconds"] and rounds < 20 * job["turns"]):
        for name, session in sessions.items():
            time.sleep(SETTLE_SECONDS)
            session.run(None, feeds[name])
            begin = time.perf_counter()
            session.run(None, feeds[name])
            samples[name].append(time.perf_counter() - begin)
        rounds += 1
    Path(job["result"]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
