"""Checks of `quark doctor` on what is installed: packages, ONNX Runtime, torch, the native library, amd-quark.

No check needs a package that an earlier check has not looked at, so they work even if numpy or onnx do not import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from quark.text import shell_command, version_numbers

OURS, THEIRS = "quark-quantizer", "amd-quark"
OURS_AGAIN = "PATH, with the wheel or checkout of quark as PATH"  # for pip: quark is on no package index
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "onnx-ir": "onnx_ir", "ml-dtypes": "ml_dtypes"}
CONSEQUENCES = {
    "click": "no command works",
    "rich": "commands cannot print their tables",
    "pillow": "folders of images cannot be read",
    "pyyaml": "configurations in YAML cannot be read",
}
ONNXRUNTIMES = {
    f"onnxruntime{suffix}"
    for suffix in ("", "-gpu", "-rocm", "-migraphx", "-directml", "-openvino", "-qnn", "-vitisai", "-training")
}
_NO_RUNTIME = "models cannot be calibrated, run or compared"
# Causes behind the messages of a loader that fails on compiled code, and the fix for the package {name}.
TROUBLES = (
    (
        r"gencode|Descriptors cannot be created|protobuf",
        "its protobuf is another version than it was built with",
        "pip install --upgrade {name} protobuf",
    ),
    (
        r"compiled using NumPy|numpy\.(_?core)\.multiarray|_ARRAY_API|numpy\.dtype size changed",
        "it was built for another version of numpy",
        "pip install --upgrade --force-reinstall --no-cache-dir {name}",
    ),
    (
        r"GLIBC(XX)?_|CXXABI_",
        "it was compiled for a newer system than this one",
        "install the wheel for this system: pip install --force-reinstall --only-binary :all: {name}",
    ),
    (
        r"failed to map segment|Operation not permitted",
        "it is on a file system that does not allow programs to run (noexec)",
        "create the virtual environment in another folder, and install there",
    ),
    (
        r"wrong ELF class|invalid ELF header|file too short|[Ii]ncompatible architecture|not a valid Win32|Exec format",
        "it is for another processor or system, or was not copied completely",
        "pip install --force-reinstall --no-cache-dir {name}",
    ),
    (
        r"libstdc\+\+|libgcc_s",
        "the C++ library of the system is missing",
        "apt-get install libstdc++6, or what your distribution calls it",
    ),
    (
        r"cannot open shared object file|DLL load failed|Library not loaded",
        "a library that it needs is missing",
        "install the library that the message names, or pip install --force-reinstall {name}",
    ),
)
# an absolute path with two folders or more, which reveals something about the user's machine
_PATH = re.compile(r"(?<![\w:/.\\<])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()]+){2,}")


class Health(str, Enum):
    """`ok` and `info` are fine; `warning` works with limitations; `broken`: something that a user needs fails."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """Result of a check; for a problem, with its consequence and the command or step that fixes it."""

    check: str
    health: Health
    detail: str
    consequence: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "health": self.health.value}

    def without_paths(self) -> Finding:
        """Return a copy for a public report, with every absolute path shortened to its last name.

        >>> Finding("quark", Health.OK, "1.0 in /srv/ann/env/quark").without_paths().detail
        '1.0 in <...>/quark'
        """

        def last_name(match: re.Match[str]) -> str:
            path = PureWindowsPath(match.group()) if "\\" in match.group() else PurePosixPath(match.group())
            return f"<...>/{path.name}"

        texts = (self.detail, self.consequence, self.remedy)
        detail, consequence, remedy = (_PATH.sub(last_name, text) for text in texts)
        return replace(self, detail=detail, consequence=consequence, remedy=remedy)


@dataclass(frozen=True)
class Requirement:
    """A distribution and its accepted versions: from `least` on, and before `below` if that is not empty."""

    name: str
    least: str
    below: str = ""
    extra: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" + (f",<{self.below}" if self.below else "")

    def is_met_by(self, version: str) -> bool:
        """True if `version` is within the bounds.

        >>> [Requirement("onnx-ir", "1.1", "2").is_met_by(version) for version in ("1.0.9", "1.1.0", "1.10rc1", "2.0")]
        [False, True, True, False]
        """
        installed = version_numbers(version)
        return version_numbers(self.least) <= installed and (not self.below or installed < version_numbers(self.below))


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of the core or of one extra, from our metadata. Empty if quark is not installed."""
    try:
        lines = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = [parse(line) for line in lines if ">=" in line]
    return [requirement for requirement in parsed if requirement.extra == extra]


def parse(line: str) -> Requirement:
    """Parse a requirement of our pyproject.toml, without the package `packaging`, which may be missing.

    >>> parse('onnxruntime>=1.20; extra == "cpu"')
    Requirement(name='onnxruntime', least='1.20', below='', extra='cpu')
    """
    specifier, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", specifier)
    least = re.search(r">=\s*([\w.]+)", specifier)
    below = re.search(r"<\s*([\w.]+)", specifier)
    extra = re.search(r"extra == [\"'](\w+)", marker)
    if name is None or least is None:
        raise ValueError(f"requirement {line!r} of {OURS} has no lower bound")
    return Requirement(
        name.group().lower().replace("_", "-"),
        least.group(1),
        below.group(1) if below else "",
        extra.group(1) if extra else "",
    )


def explain(error: BaseException, name: str) -> tuple[str, str]:
    """Return the cause of an exception raised when loading the package `name`, and the fix."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for pattern, cause, remedy in TROUBLES:
        if re.search(pattern, message):
            return f"{cause} ({message})", remedy.format(name=name)
    return message, f"pip install --force-reinstall --no-cache-dir {name}"


def core_packages() -> Iterator[Finding]:
    """Check every required package, by the bounds in our metadata."""
    needed = requirements()
    if not needed:
        detail = f"{OURS} is not installed: these are sources, of no known version"
        yield Finding(
            "quark", Health.WARNING, detail, "versions of packages are not checked", "pip install --editable ."
        )
    for requirement in needed:
        yield _check_package(requirement, CONSEQUENCES.get(requirement.name, "nothing can be quantized"))


def _check_package(requirement: Requirement, consequence: str, health: Health = Health.BROKEN) -> Finding:
    """Check one package; `health` applies if there is a problem."""
    name = requirement.name
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, health, "not installed", consequence, shell_command(["pip", "install", str(requirement)]))
    if not requirement.is_met_by(version):
        detail = f"{version} is installed, {requirement} is needed"
        remedy = shell_command(["pip", "install", "--upgrade", str(requirement)])
        return Finding(name, health, detail, consequence, remedy)
    return _check_import(name, version, consequence, health)


def _check_import(name: str, version: str, consequence: str, health: Health = Health.BROKEN) -> Finding:
    """Check that a package can be imported, and that the import finds the installed one."""
    module = IMPORT_NAMES.get(name, name)
    if elsewhere := shadowing_file(module):
        detail = f"'import {module}' finds {elsewhere}, another module of that name"
        return Finding(name, health, detail, consequence, "leave that folder (cd), or remove it from PYTHONPATH")
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - anything that a broken package raises
        cause, remedy = explain(error, name)
        return Finding(name, health, f"{version} does not import: {cause}", consequence, remedy)
    return Finding(name, Health.OK, version)


def shadowing_file(module: str) -> Path | None:
    """Return the file that an import finds instead of an installed package, if there is one.

    It is in the current folder, or ours: Python started inside the sources finds quark/onnx as `onnx`.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # set to None in sys.modules; the import itself will fail
        return None
    places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
    here = Path.cwd().resolve()
    # an environment in this folder does not count
    local = {here / f"{module}.py", here / module, here / module / "__init__.py"}
    for place in places:
        path = Path(place).resolve()
        if path.parent.is_relative_to(PACKAGE_FOLDER) or path in local:
            return path
    return None


def onnxruntime() -> Iterator[Finding]:
    """Check for a single distribution of ONNX Runtime that is complete, new enough and runs on the CPU."""
    names = sorted(
        {_canonical_name(distribution) for distribution in importlib.metadata.distributions()} & ONNXRUNTIMES
    )
    if len(names) > 1:
        removal = shell_command(["pip", "uninstall", "--yes", *names])
        installation = shell_command(["pip", "install", names[0]])
        remedy = f"{removal}; then install one of them again: {installation}"
        detail = f"{len(names)} distributions overwrite each other's files: {', '.join(names)}"
        yield Finding("onnxruntime", Health.BROKEN, detail, "which of them runs is undefined", remedy)
    if not names and importlib.util.find_spec("onnxruntime") is None:
        remedy = "pip install onnxruntime, or the distribution for your hardware"
        yield Finding("onnxruntime", Health.BROKEN, "not installed", _NO_RUNTIME, remedy)
        return
    yield _onnxruntime_module(names[0] if names else "onnxruntime")


def _onnxruntime_module(name: str) -> Finding:
    module_state = _check_import("onnxruntime", name, _NO_RUNTIME)
    if module_state.health is not Health.OK:
        return module_state
    module = importlib.import_module("onnxruntime")
    again = shell_command(["pip", "install", "--force-reinstall", "--no-cache-dir", name])
    if not hasattr(module, "InferenceSession"):
        detail = f"the folder of {name} exists without its files: another distribution was uninstalled over it"
        return Finding("onnxruntime", Health.BROKEN, detail, _NO_RUNTIME, again)
    version, providers = str(module.__version__), list(module.get_available_providers())
    needed = next(iter(requirements("cpu")), Requirement("onnxruntime", "1.20"))
    if not needed.is_met_by(version):
        remedy = shell_command(["pip", "install", "--upgrade", f"{name}>={needed.least}"])
        detail = f"{version} is installed, {needed.least} or newer is needed"
        return Finding("onnxruntime", Health.BROKEN, detail, "operators and opsets are missing", remedy)
    if "CPUExecutionProvider" not in providers:
        detail = f"{version} has no CPUExecutionProvider, only {', '.join(providers) or 'none'}"
        return Finding("onnxruntime", Health.BROKEN, detail, _NO_RUNTIME, again)
    return Finding("onnxruntime", Health.OK, f"{name} {version} with {', '.join(providers)}")


def torch() -> Iterator[Finding]:
    """Check torch. Problems are warnings, since quark.onnx does not need it."""
    requirement = next((requirement for requirement in requirements("torch") if requirement.name == "torch"), None)
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Health.INFO, "not installed; quark.onnx does not need it")
        return
    consequence = "quark.torch and finetuning do not work; the rest does"
    finding = _check_package(requirement or Requirement("torch", "2.6"), consequence, Health.WARNING)
    yield finding
    if finding.health is not Health.OK:
        return
    module = importlib.import_module("torch")
    if module.version.cuda and not module.cuda.is_available():
        detail = f"this build is for CUDA {module.version.cuda}, and no device or driver is found"
        remedy = "nvidia-smi shows whether the driver works; without a GPU, install torch's build for the CPU"
        yield Finding("torch on CUDA", Health.WARNING, detail, "torch computes on the CPU, slower", remedy)
    elif module.cuda.is_available():
        names = ", ".join(module.cuda.get_device_name(number) for number in range(module.cuda.device_count()))
        yield Finding("torch on CUDA", Health.OK, f"CUDA {module.version.cuda or 'none, for ROCm'} on {names}")


def gpu() -> Iterator[Finding]:
    """Check NVIDIA GPUs: driver, ONNX Runtime's provider, and where our operators run."""
    import onnxruntime

    from quark.devices import CUDA_PROVIDER, INSTALL, driver
    from quark.formats.native import cuda_problem

    nvidia = driver()
    if nvidia.trouble:
        yield Finding("GPU", Health.INFO, f"{nvidia.trouble}: networks run on the CPU")
        return
    listed = ", ".join(f"cuda:{number} {name}" for number, name in enumerate(nvidia.devices))
    yield Finding("GPU", Health.OK, f"{listed}; the driver is for CUDA {nvidia.version}")
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        detail = f"this ONNX Runtime has no {CUDA_PROVIDER}"
        yield Finding("onnxruntime on CUDA", Health.WARNING, detail, "networks run on the CPU", INSTALL["cuda"])
        return
    problem = cuda_problem()
    try:
        is_exact = _is_exact(("cuda:0",), not problem)
    except Exception as error:  # noqa: BLE001 - anything that a broken package raises
        consequence = "a device that is asked for is an error; networks run on the CPU"
        remedy = "a build of torch for the same CUDA brings the libraries, or install CUDA and cuDNN 9"
        yield Finding("onnxruntime on CUDA", Health.WARNING, " ".join(str(error).split()), consequence, remedy)
        return
    way = f"as portable functions, since {problem}" if problem else "by kernels of the library"
    if is_exact:
        yield Finding("onnxruntime on CUDA", Health.OK, f"MXQuantizeDequantize runs there {way} and is exact")
    else:
        consequence = "results of block formats are wrong on the GPU"
        detail = f"MXQuantizeDequantize, {way}, is not exact there"
        yield Finding("onnxruntime on CUDA", Health.BROKEN, detail, consequence, "report it; use the device cpu")


def _canonical_name(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"]).lower().replace("_", "-")


def amd_quark() -> Iterator[Finding]:
    """Check that the package folder contains only our files: AMD's package also installs into a folder `quark`."""
    mixed = "an import may find the files of either package"
    installed = {_canonical_name(distribution): distribution for distribution in importlib.metadata.distributions()}
    if THEIRS in installed:
        detail = f"{THEIRS} {installed[THEIRS].version} is installed here, and also imports as 'quark'"
        remedy = f"pip uninstall --yes {THEIRS} {OURS}, install the one you want; both: separate virtual environments"
        yield Finding(THEIRS, Health.BROKEN, detail, mixed, remedy)
        return
    foreign = foreign_files(PACKAGE_FOLDER, installed.get(OURS))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        detail = f"{PACKAGE_FOLDER} contains files of another package: {shown}"
        remedy = f"delete that folder, then pip install --force-reinstall {OURS_AGAIN}"
        yield Finding(THEIRS, Health.BROKEN, detail, mixed, remedy)
        return
    yield Finding(THEIRS, Health.OK, "not installed here")


def foreign_files(folder: Path, distribution: importlib.metadata.Distribution | None) -> list[str]:
    """Return the Python files under site-packages/quark that our distribution did not install, relative to it.

    Empty for an editable install, whose files are the sources that run now.
    """
    record = [Path(str(file)) for file in (distribution.files or [])] if distribution is not None else []
    ours = {file.as_posix() for file in record if file.parts[:1] == ("quark",) and file.suffix == ".py"}
    if ours:
        present = {file.relative_to(folder.parent).as_posix() for file in folder.rglob("*.py")}
        return sorted(name.removeprefix("quark/") for name in present - ours)
    folder = Path(str(distribution.locate_file("quark"))) if distribution is not None else folder
    if not folder.is_dir() or folder.resolve() == PACKAGE_FOLDER:
        return []
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))


def native_library() -> Iterator[Finding]:
    """Check that the compiled library loads, or was left out on purpose."""
    from quark.formats.native import FILE_NAME, instruction_set, library_file

    path = library_file()
    if path is None:
        detail = f"no native library ({FILE_NAME}): portable operators, slower"
        consequence = "everything works, by portable operators: quantizing and models with block formats are slower"
        remedy = (
            "install a C++17 compiler, or take the wheel for this system, then: "
            f"pip install --force-reinstall --no-deps --no-cache-dir {OURS_AGAIN}"
        )
        yield Finding("native library", Health.WARNING, detail, consequence, remedy)
        return
    try:
        instructions = instruction_set()
    except (OSError, AttributeError) as error:  # it does not load, or lacks a function that this version calls
        cause, remedy = explain(error, OURS_AGAIN)
        detail = f"{path} does not load: {cause}"
        consequence = "models with operators of ours cannot be run"
        without = "QUARK_PURE_PYTHON=1 pip install --force-reinstall --no-deps PATH, with the checkout of quark as PATH"
        remedy = f"{remedy}; or do without the library: {without}"
        yield Finding("native library", Health.BROKEN, detail, consequence, remedy)
        return
    if instructions is None:
        detail = f"{path.name} is not used on arrays: QUARK_NO_NATIVE=1 is set"
        yield Finding("native library", Health.INFO, detail, "quantizing arrays is slower", "unset QUARK_NO_NATIVE")
    else:
        forced = ", set by QUARK_INSTRUCTION_SET" if os.environ.get("QUARK_INSTRUCTION_SET") else ""
        yield Finding("native library", Health.OK, f"{path.name} loads, for {instructions}{forced}")


def custom_operator() -> Iterator[Finding]:
    """Run one operator of ours in ONNX Runtime and compare it with numpy."""
    from quark.formats.native import library_file

    has_library = library_file() is not None
    way = "by the library" if has_library else "as portable functions"
    if _is_exact(("cpu",), has_library):
        yield Finding("custom operator", Health.OK, f"MXQuantizeDequantize runs in ONNX Runtime {way} and is exact")
    else:
        detail = f"MXQuantizeDequantize, {way}, returned other numbers than numpy's"
        remedy = f"pip install --force-reinstall --no-cache-dir {OURS_AGAIN}; if that changes nothing, report it"
        yield Finding("custom operator", Health.BROKEN, detail, "results of block formats are wrong", remedy)


def _is_exact(devices: tuple[str, ...], has_library: bool) -> bool:
    """True if our operator computes what numpy does there, by the library or as a function."""
    import numpy as np
    import onnxruntime

    from quark.devices import providers_of
    from quark.formats import quantize_dequantize
    from quark.ops.library import get_library_path
    from quark.ops.portable_functions import add_portable_functions

    model = _model_of_one_operator()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if has_library:
        options.register_custom_ops_library(get_library_path())
    else:
        model = add_portable_functions(model)
    where = providers_of(devices)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=list(where.names), provider_options=list(where.options)
    )
    where.check_loaded(session)
    x = np.array([0.1, -0.7, 3.3, 6.1], np.float32)
    (y,) = session.run(None, {"x": x})
    return np.array_equal(y, quantize_dequantize(x, "mxint8"))


def _model_of_one_operator() -> Any:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    node = helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain="com.amd.quark", axis=0, rounding_mode=2)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    graph = helper.make_graph([node], "smoke", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
