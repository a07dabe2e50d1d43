"""Write what a pinned installation consists of, as CycloneDX 1.6 JSON.

    .venv/bin/python release/write_sbom.py [--into dist/sbom.cdx.json] [--extra cpu --extra torch ...]

The components are the distributions of this environment that quark-quantizer and the extras asked for need, directly
or not; versions, licenses and who needs whom come from their own metadata. There is no date in it and the serial number
follows from the content: the same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OURS = "quark-quantizer"
EXTRAS = ("cpu", "torch", "demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "sbom.cdx.json")
    parser.add_argument("--extra", action="append", help=f"default: {', '.join(EXTRAS)}")
    options = parser.parse_args()
    content = json.dumps(bill_of_materials(options.extra or EXTRAS), indent=2) + "\n"
    options.into.parent.mkdir(parents=True, exist_ok=True)
    part = options.into.with_name(f".{options.into.name}.part")
    part.write_text(content)
    os.replace(part, options.into)
    print(f"{options.into.name}: {content.count('bom-ref') - 1} components")


def bill_of_materials(extras: Iterable[str]) -> dict[str, Any]:
    needs = needed(extras)
    bom: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component(OURS), "type": "library"}},
        "components": [component(name) for name in sorted(needs) if name != OURS],
        "dependencies": [
            {"ref": reference(name), "dependsOn": sorted(map(reference, needs[name]))} for name in sorted(needs)
        ],
    }
    return {**bom, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))}"}


def needed(extras: Iterable[str]) -> dict[str, set[str]]:
    """Every distribution that is needed, with those that it needs itself."""
    needs: dict[str, set[str]] = {}
    waiting = [(OURS, extra) for extra in ("", *extras)]
    seen = set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        needs.setdefault(name, set())
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            other = str(canonicalize_name(requirement.name))
            if is_wanted(requirement, extra) and is_installed(other):
                needs[name].add(other)
                waiting += [(other, extra) for extra in ("", *requirement.extras)]
    return {name: others - {name} for name, others in needs.items()}


def is_wanted(requirement: Requirement, extra: str) -> bool:
    """That it applies here, with the extra (empty: without any)."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def is_installed(name: str) -> bool:
    """An optional part of a dependency may be absent, which is then no part of this environment."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def component(name: str) -> dict[str, Any]:
    metadata = importlib.metadata.metadata(name)
    described = {
        "type": "library",
        "bom-ref": reference(name),
        "name": metadata["Name"],
        "version": metadata["Version"],
        "purl": reference(name),
    }
    if licenses := licenses_of(metadata):
        described["licenses"] = licenses
    return described


def reference(name: str) -> str:
    version = importlib.metadata.version(name)
    return f"pkg:pypi/{canonicalize_name(name)}@{version.replace('+', '%2B')}"


def licenses_of(metadata: Any) -> list[dict[str, Any]]:
    """The license expression; else the license classifiers; else a short text in the old field."""
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [
        classifier.split(" :: ")[-1]
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith("License ::")
    ]
    old = (metadata.get("License") or "").strip()
    names = classifiers or ([old] if old and "\n" not in old else [])
    return [{"license": {"name": name}} for name in names]


if __name__ == "__main__":
    main()
