"""Write where there is no room or no right to, and look at what is said and left.

    python full_disks.py FOLDER limit|full|readonly [WORK ...]

limit       no file may grow beyond some bytes (RLIMIT_FSIZE): several limits, so that early and late writes fail
full        a disk (tmpfs) with little room
readonly    a disk that cannot be written to

The last two mount something over FOLDER/out, in a mount namespace of their own: this process has to be started in one
(unshare -m). For every work the error must be a QuarkError that names the file or its folder and the reason, and the
folder must be as it was, with the outputs of an earlier run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from broken_checks import OLD, contents
from tiny_models import save_images

from quark.cli.main import main as quark
from quark.demo import network_path
from quark.errors import QuarkError
from quark.evaluate.datasets import prepare_data
from quark.onnx import get_default_config, quantize
from quark.onnx.pack import pack_model, unpack_model
from quark.search import Wanted, search

LIMITS = (0, 3000)
CAUSES = ("File too large", "No space left", "Read-only file system")


def data(folder: Path) -> Path:
    return folder / "calib.npz"


def save_model(folder: Path) -> None:
    quantize(folder / "m.onnx", data(folder), "XINT8").save(folder / "out" / "model.onnx")


def save_two_files(folder: Path) -> None:
    config = get_default_config("XINT8")
    config.use_external_data_format = True
    quantize(folder / "m.onnx", data(folder), config).save(folder / "out" / "model.onnx")


def save_config(folder: Path) -> None:
    get_default_config("XINT8").save(folder / "out" / "config.yaml")


def write_report(folder: Path) -> None:
    arguments = ["report", folder / "q.onnx", "--float", folder / "m.onnx", "--num-calib", 2, "--calib", data(folder)]
    run_command(*arguments, "-o", folder / "out" / "page.html")


def run_search(folder: Path) -> None:
    search(folder / "m.onnx", data(folder), Wanted(presets=("BF16",)), folder=folder / "out" / "found")


def prepare(folder: Path) -> None:
    prepare_data(folder / "img", folder / "out" / "calib")


def export_torch(folder: Path) -> None:
    import torch

    from quark.torch import ModelExporter

    ModelExporter(export_dir=folder / "out").export_onnx_model(
        torch.nn.Linear(600, 40), torch.rand(1, 600), "model.onnx"
    )


def run_command(*arguments: object) -> None:
    """A command, whose line on stderr becomes an error again."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            quark([str(argument) for argument in arguments], standalone_mode=False)
        except click.ClickException as error:
            raise QuarkError(error.message) from error


WORKS: dict[str, Callable[[Path], object]] = {
    "quantize": save_model,
    "quantize to two files": save_two_files,
    "pack": lambda folder: pack_model(folder / "mx.onnx", folder / "out" / "model.onnx"),
    "unpack": lambda folder: unpack_model(folder / "packed.onnx", folder / "out" / "model.onnx"),
    "config": save_config,
    "report": write_report,
    "search": run_search,
    "prepare-data": prepare,
    "export": export_torch,
}
QUICK = [name for name in WORKS if name != "export"]  # torch takes long to import


def make_inputs(folder: Path) -> None:
    shutil.copy(network_path(), folder / "m.onnx")
    save_images(folder / "img", 1)
    np.savez(data(folder), input=np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32))
    quantize(folder / "m.onnx", data(folder), "XINT8").save(folder / "q.onnx")
    quantize(folder / "m.onnx", data(folder), "MXINT8").save(folder / "mx.onnx")
    pack_model(folder / "mx.onnx", folder / "packed.onnx")


def fill_output(folder: Path) -> None:
    """What an earlier run left."""
    (folder / "out").mkdir(exist_ok=True)
    for name in ("model.onnx", "model.json", "page.html", "config.yaml"):
        (folder / "out" / name).write_bytes(OLD)


def attempt(name: str, folder: Path, limit: int | None) -> str:
    """What came of a work, in a child of its own: '' where it went well, else the error or what is wrong with it."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        said = ""
        try:
            WORKS[name](folder)
        except QuarkError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"SURPRISE: {error!r}"
        os.write(writing, said.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return said if not status else f"SURPRISE: the process ended with status {status}"


def check(name: str, folder: Path, limit: int | None, where: str) -> bool:
    """Whether the work was refused, as it should be where anything was in its way."""
    fill_output(folder) if where == "limit" else None
    before = contents(folder / "out")
    said = attempt(name, folder, limit)
    if not said:
        return False
    print(f"{where} {limit or ''} {name}: {said}")
    if not said.startswith("refused") or not any(cause in said for cause in CAUSES):
        raise SystemExit(f"{name}: expected an error of ours that says why, got {said}")
    if str(folder / "out") not in said:
        raise SystemExit(f"{name}: the error names no file: {said}")
    after = contents(folder / "out")
    changed = {each for each in before if after.get(each) != before[each]}
    new = {each for each in after if each not in before and not each.startswith(("found", "calib"))}
    hidden = {each for each in after if Path(each).name.startswith((".quark-", ".trial-"))}
    if changed or new or hidden:
        raise SystemExit(f"{name}: changed {changed}, left behind {new | hidden}")
    return True


def mount(folder: Path, where: str) -> None:
    room = ["mount", "-t", "tmpfs", "-o", "size=40k", "none", folder / "out"]
    subprocess.run(room, check=True, capture_output=True)
    fill_output(folder)
    if where == "full":
        with contextlib.suppress(OSError), (folder / "out" / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
    else:
        subprocess.run(["mount", "-o", "remount,ro", folder / "out"], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("where", choices=["limit", "full", "readonly"])
    parser.add_argument("works", nargs="*", default=QUICK)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    process = os.fork()  # sessions belong to children: this process forks
    if not process:
        make_inputs(folder)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        raise SystemExit("the inputs cannot be made")
    (folder / "out").mkdir(exist_ok=True)
    if arguments.where != "limit":
        mount(folder, arguments.where)
    limits = LIMITS if arguments.where == "limit" else (None,)
    for name in arguments.works:
        refusals = [check(name, folder, limit, arguments.where) for limit in limits]
        if not any(refusals):
            raise SystemExit(f"{name}: it wrote where nothing can be written")
    print(f"{arguments.where}: {len(arguments.works)} works")


if __name__ == "__main__":
    main()
