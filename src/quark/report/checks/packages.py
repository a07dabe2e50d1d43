"""Packages: installed, new enough, importable, and the ones that were meant."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from quark.report.checks.finding import Finding, Health
from quark.report.checks.loading import explain
from quark.report.checks.requirements import OURS, Requirement, requirements
from quark.text import shell_command

IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "onnx-ir": "onnx_ir", "ml-dtypes": "ml_dtypes"}
CONSEQUENCES = {
    "click": "no command works",
    "rich": "commands cannot print their tables",
    "pillow": "folders of images cannot be read",
    "pyyaml": "configurations in YAML cannot be read",
}
_NOTHING_WORKS = "nothing can be quantized"


def core_packages() -> Iterator[Finding]:
    """Every package that quark cannot do without, by the bounds of its metadata."""
    needed = requirements()
    if not needed:
        detail = f"{OURS} is not installed: these are sources, of no known version"
        yield Finding(
            "quark", Health.WARNING, detail, "versions of packages are not checked", "pip install --editable ."
        )
    for requirement in needed:
        yield check_package(requirement, CONSEQUENCES.get(requirement.name, _NOTHING_WORKS))


def check_package(requirement: Requirement, consequence: str, health: Health = Health.BROKEN) -> Finding:
    """One package; `health` is how bad it is when it is not well."""
    name = requirement.name
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, health, "not installed", consequence, shell_command(["pip", "install", str(requirement)]))
    if not requirement.is_met_by(version):
        detail = f"{version} is installed, {requirement} is needed"
        remedy = shell_command(["pip", "install", "--upgrade", str(requirement)])
        return Finding(name, health, detail, consequence, remedy)
    return imported(name, version, consequence, health)


def imported(name: str, version: str, consequence: str, health: Health = Health.BROKEN) -> Finding:
    """Whether the package can be imported, and comes from where it was installed."""
    module = IMPORT_NAMES.get(name, name)
    if elsewhere := shadowing_file(module):
        detail = f"'import {module}' finds {elsewhere}, which is another module of that name"
        return Finding(name, health, detail, consequence, "leave that folder (cd), or take it out of PYTHONPATH")
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken package raises is what the user came to hear
        cause, remedy = explain(error, name)
        return Finding(name, health, f"{version} does not import: {cause}", consequence, remedy)
    return Finding(name, Health.OK, version)


def shadowing_file(module: str) -> Path | None:
    """The file that an import would take in the place of an installed package.

    One in the current folder; or ours, where Python was started inside the sources and finds quark/onnx as `onnx`."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # set to None in sys.modules: nothing will be imported, which import says itself
        return None
    places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        path = Path(place).resolve()
        if path.parent.is_relative_to(_package_folder()) or _is_in_current_folder(path, module):
            return path
    return None


def _is_in_current_folder(path: Path, module: str) -> bool:
    """That it is ./module.py, ./module or ./module/__init__.py, and no environment in this folder."""
    here = Path.cwd().resolve()
    return path in {here / f"{module}.py", here / module, here / module / "__init__.py"}


def _package_folder() -> Path:
    return Path(__file__).resolve().parents[2]
