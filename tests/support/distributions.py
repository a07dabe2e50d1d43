"""Distributions that are not installed, for `importlib.metadata` to find."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


class FakeDistribution:
    def __init__(self, name, files=(), root=Path("."), version="9.9"):
        self.metadata = {"Name": name}
        self.version = version
        self.files = [importlib.metadata.PackagePath(file) for file in files]
        self.root = root

    def locate_file(self, path):
        return self.root / path


def install(monkeypatch, *names):
    """As if distributions of these names were installed too."""
    real = list(importlib.metadata.distributions())
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*real, *map(FakeDistribution, names)])


def set_version(monkeypatch, name, version):
    """As if another version of one distribution were installed; None: as if it were not."""
    real = importlib.metadata.version

    def pretended(each):
        if each != name:
            return real(each)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", pretended)
