"""Run a judge script in its own process: list its networks, write calibration samples, or evaluate files.

    python -I judge.py JOB

A judge script is a Python file with a table NETWORKS, name to class. A class is built with the folder that the networks
were built in, and has `calibration()`, a list of dicts (input name to array, one sample each), and
`evaluate(path, library)`, a dict of measures.

JOB is JSON: task, judge (the path of the script), zoo (the folder), result (the file to write), and by task:

    list           nothing more; gives the networks that have a float model, with its path
    calibration    name, folder, count and spare: writes `count` samples evenly spaced over the data, then `spare` of
                   the rest, one .npz file each
    evaluate       name, files (each a path, and a library of operators or null) and partial: gives the measures or the
                   error of each file; `partial` has those so far, also after a crash

Run by the interpreter that has what the judge script needs; nothing of this folder is imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

Job = dict[str, Any]


def load_networks(judge: str) -> dict[str, Any]:
    """Return the NETWORKS of a script, which may import modules beside it."""
    path = Path(judge)
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"judge '{path.name}': expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    networks = getattr(module, "NETWORKS", None)
    if not isinstance(networks, dict):
        raise SystemExit(f"judge '{path.name}' has no NETWORKS: expected a dict of network classes by name")
    return networks


def model_path(job: Job, name: str) -> Path:
    return Path(job["zoo"], f"{name}.onnx")


def list_networks(job: Job) -> dict[str, Any]:
    names = list(load_networks(job["judge"]))
    return {
        "known": names,
        "built": {name: str(model_path(job, name)) for name in names if model_path(job, name).is_file()},
    }


def evenly_spaced(indices: list[int], count: int) -> list[int]:
    """Return `count` of the indices, or all where there are fewer."""
    count = min(count, len(indices))
    return [indices[i * len(indices) // count] for i in range(count)]


def write_calibration(job: Job) -> dict[str, Any]:
    feeds = load_networks(job["judge"])[job["name"]](job["zoo"]).calibration()
    if not feeds:
        raise SystemExit(f"judge: {job['name']} has no calibration samples")
    chosen = evenly_spaced(list(range(len(feeds))), job["count"])
    spare = evenly_spaced(sorted(set(range(len(feeds))) - set(chosen)), job["spare"])
    for number, index in enumerate([*chosen, *spare]):
        np.savez(Path(job["folder"], f"{number:05d}.npz"), **feeds[index])
    return {"count": len(chosen), "spare": len(spare), "available": len(feeds)}


def evaluate(job: Job) -> dict[str, Any]:
    network = load_networks(job["judge"])[job["name"]](job["zoo"])
    results: list[dict[str, Any]] = []
    for path, library in job["files"]:
        try:
            results.append({"measures": dict(network.evaluate(path, library))})
        except Exception as error:  # reported as the result of this file; the others are still worth having
            results.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        Path(job["partial"]).write_text(json.dumps(results, default=float))
    return {"results": results}


TASKS = {"list": list_networks, "calibration": write_calibration, "evaluate": evaluate}


def main() -> None:
    job: Job = json.loads(sys.argv[1])
    Path(job["result"]).write_text(json.dumps(TASKS[job["task"]](job), default=float))


if __name__ == "__main__":
    main()
