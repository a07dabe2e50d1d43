"""ONNX Runtime, of which several distributions overwrite each other, and torch, which may be there."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator

from quark.report.checks.finding import Finding, Health
from quark.report.checks.packages import check_package, imported
from quark.report.checks.requirements import OURS, Requirement, requirements
from quark.text import shell_command

ONNXRUNTIMES = {
    f"onnxruntime{suffix}"
    for suffix in ("", "-gpu", "-rocm", "-migraphx", "-directml", "-openvino", "-qnn", "-vitisai", "-training")
}
_NO_RUNTIME = "models cannot be calibrated, run or compared"
_NO_TORCH = "quark.torch and finetuning do not work; the rest does"


def onnxruntime() -> Iterator[Finding]:
    """One distribution, new enough, whose module is whole and computes on the CPU."""
    names = sorted({canonical_name(each) for each in importlib.metadata.distributions()} & ONNXRUNTIMES)
    if len(names) > 1:
        removal, installation = (
            shell_command(["pip", "uninstall", "--yes", *names]),
            shell_command(["pip", "install", names[0]]),
        )
        remedy = f"{removal}; then install one of them again: {installation}"
        detail = f"{len(names)} distributions overwrite each other's files: {', '.join(names)}"
        yield Finding("onnxruntime", Health.BROKEN, detail, "which of them runs is chance", remedy)
    if not names and importlib.util.find_spec("onnxruntime") is None:
        remedy = f"{shell_command(['pip', 'install', f'{OURS}[cpu]'])}, or the distribution for your hardware"
        yield Finding("onnxruntime", Health.BROKEN, "not installed", _NO_RUNTIME, remedy)
        return
    yield _onnxruntime_module(names[0] if names else "onnxruntime")


def _onnxruntime_module(name: str) -> Finding:
    module_state = imported("onnxruntime", name, _NO_RUNTIME)
    if module_state.health is not Health.OK:
        return module_state
    module = importlib.import_module("onnxruntime")
    again = shell_command(["pip", "install", "--force-reinstall", "--no-cache-dir", name])
    if not hasattr(module, "InferenceSession"):
        detail = f"the folder of {name} is left, and its files are gone: another distribution was uninstalled over it"
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
    """Not needed by quark.onnx, so that no trouble with it is `broken`."""
    found = next((each for each in requirements("torch") if each.name == "torch"), None)
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Health.INFO, "not installed; quark.onnx does not need it")
        return
    finding = check_package(found or Requirement("torch", "2.6"), _NO_TORCH, Health.WARNING)
    yield finding
    if finding.health is not Health.OK:
        return
    module = importlib.import_module("torch")
    if module.version.cuda and not module.cuda.is_available():
        detail = f"this build is for CUDA {module.version.cuda}, and no device or driver is found"
        remedy = "nvidia-smi shows whether the driver works; without a GPU, install torch's build for the CPU"
        yield Finding("torch on CUDA", Health.WARNING, detail, "torch computes on the CPU, slower", remedy)


def canonical_name(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"]).lower().replace("_", "-")
