"""Whether this installation works: what `quark doctor` looks at, one check after the other.

A check gives a Finding. `ok` and `info` are fine; `broken` means that something a user asks for will fail, and says
what to do. A check that raises is itself a finding, so that one broken package cannot hide the others.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

OURS = "quark-quantizer"
THEIRS = "amd-quark"
RUNTIMES = {
    f"onnxruntime{suffix}"
    for suffix in ("", "-gpu", "-rocm", "-migraphx", "-directml", "-openvino", "-qnn", "-vitisai", "-training")
}
SEPARATE = "install them in separate virtual environments"


class Health(str, Enum):
    OK = "ok"
    INFO = "info"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` says what to do where something is broken."""

    check: str
    health: Health
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "health": self.health.value}


def examine() -> list[Finding]:
    """All checks, in their order."""
    return [finding for name, check in CHECKS for finding in _outcome(name, check)]


def _outcome(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # whatever a broken package raises is what the user came to hear
        return [Finding(name, Health.BROKEN, f"{type(error).__name__}: {error}")]


def is_healthy(findings: list[Finding]) -> bool:
    return all(each.health is not Health.BROKEN for each in findings)


def _python() -> Iterator[Finding]:
    yield Finding("python", Health.OK, f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield Finding("quark", Health.OK, f"{importlib.metadata.version(OURS)} in {_package_folder()}")


def _packages() -> Iterator[Finding]:
    for name in ("numpy", "onnx", "onnx_ir", "ml_dtypes", "PIL", "yaml", "rich"):
        module = importlib.import_module(name)
        yield Finding(name, Health.OK, str(getattr(module, "__version__", "installed")))


def _onnxruntime() -> Iterator[Finding]:
    if importlib.util.find_spec("onnxruntime") is None:
        remedy = f'pip install "{OURS}[cpu]", or the distribution for your hardware'
        yield Finding("onnxruntime", Health.BROKEN, "not installed", remedy)
        return
    import onnxruntime

    providers = ", ".join(onnxruntime.get_available_providers())
    yield Finding("onnxruntime", Health.OK, f"{onnxruntime.__version__} with {providers}")
    names = sorted({_name(each) for each in importlib.metadata.distributions()} & RUNTIMES)
    if len(names) > 1:
        remedy = f"pip uninstall {' '.join(names)}, then install one of them again"
        yield Finding("onnxruntime", Health.BROKEN, f"{len(names)} distributions overwrite each other", remedy)


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Health.INFO, "not installed; quark.onnx does not need it")
    else:
        yield Finding("torch", Health.OK, importlib.metadata.version("torch"))


def _native_library() -> Iterator[Finding]:
    from quark.formats.native import instruction_set, library_file

    path = library_file()
    if path is None:
        remedy = f"install again where a C++17 compiler is found: pip install --force-reinstall {OURS}"
        yield Finding("native library", Health.BROKEN, "not in the installed package", remedy)
        return
    instructions = instruction_set()
    if instructions is None:
        yield Finding("native library", Health.INFO, f"{path.name}, switched off by QUARK_NO_NATIVE")
    else:
        yield Finding("native library", Health.OK, f"{path.name} loads, for {instructions}")


def _operator() -> Iterator[Finding]:
    """One operator of ours, with the library, against numpy."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    from quark.formats import quantize_dequantize
    from quark.ops.library import get_library_path

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    node = helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain="com.amd.quark", axis=0, rounding_mode=2)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    graph = helper.make_graph([node], "smoke", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.array([0.1, -0.7, 3.3, 6.1], np.float32)
    (y,) = session.run(None, {"x": x})
    if np.array_equal(y, quantize_dequantize(x, "mxint8")):
        yield Finding("custom operator", Health.OK, "MXQuantizeDequantize runs in ONNX Runtime and is exact")
    else:
        yield Finding("custom operator", Health.BROKEN, f"MXQuantizeDequantize gave {y.tolist()}", "report this")


def _amd_quark() -> Iterator[Finding]:
    """AMD's package has the same import name: one of the two overwrites the other's files."""
    installed = {_name(each): each for each in importlib.metadata.distributions()}
    if THEIRS in installed:
        detail = f"{THEIRS} {installed[THEIRS].version} is installed here, and also imports as 'quark'"
        remedy = f"pip uninstall {THEIRS} {OURS}, install the one you want; or {SEPARATE}"
        yield Finding(THEIRS, Health.BROKEN, detail, remedy)
        return
    foreign = foreign_files(_package_folder(), installed.get(OURS))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        detail = f"files that are not ours lie in {_package_folder()}: {shown}"
        yield Finding(THEIRS, Health.BROKEN, detail, f"delete that folder, then pip install --force-reinstall {OURS}")
        return
    yield Finding(THEIRS, Health.OK, "not installed here")


def foreign_files(folder: Path, distribution: importlib.metadata.Distribution | None) -> list[str]:
    """Python files under site-packages/quark that our distribution did not install, by their paths in that folder.

    None where quark is an editable install, whose files are its sources' own."""
    record = [Path(str(each)) for each in (distribution.files or [])] if distribution is not None else []
    ours = {each.as_posix() for each in record if each.parts[:1] == ("quark",) and each.suffix == ".py"}
    if not ours:
        folder = Path(str(distribution.locate_file("quark"))) if distribution is not None else folder
        return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.py")) if _is_apart(folder) else []
    found = {each.relative_to(folder.parent).as_posix() for each in folder.rglob("*.py")}
    return sorted(each.removeprefix("quark/") for each in found - ours)


def _is_apart(folder: Path) -> bool:
    """That the folder is another one than the sources that run now."""
    return folder.is_dir() and folder.resolve() != _package_folder().resolve()


def _name(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"]).lower().replace("_", "-")


def _package_folder() -> Path:
    return Path(__file__).resolve().parents[1]


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("onnxruntime", _onnxruntime),
    ("torch", _torch),
    ("native library", _native_library),
    ("custom operator", _operator),
    (THEIRS, _amd_quark),
)
