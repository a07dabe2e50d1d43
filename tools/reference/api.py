"""docs/api/*.md: every public name of the packages that people import, with its signature and docstring.

Public is what `__all__` lists; of a module without one, the functions and classes that it defines. Nothing is written
by hand: what the reference lacks is to be said in the docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

from tools.reference.docstrings import docstring, to_markdown
from tools.reference.markdown import code, fenced, generated, table
from tools.reference.signatures import signature_of

_CONFIG = "quark.torch.quantization.config"

# page -> the modules on it
PAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "onnx": ("quark.onnx", "quark.onnx.pack", "quark.onnx.lint", "quark.onnx.diagnose", "quark.plan"),
        "torch": ("quark.torch", "quark.torch.export", f"{_CONFIG}.config", f"{_CONFIG}.type")
        + ("quark.torch.quantization.observer",),
        "formats": ("quark.formats",),
        "ops": ("quark.ops.library", "quark.ops.portable_functions", "quark.ops.fake_quantize"),
        "evaluate": ("quark.evaluate", "quark.search", "quark.measures"),
        "report": ("quark.account", "quark.compare", "quark.diagnosis", "quark.card"),
        "vision": ("quark.vision", "quark.vision.training", "quark.vision.data", "quark.vision.networks"),
        "npu": ("quark.npu",),
        "errors": ("quark.errors",),
        "demo": ("quark.demo", "quark.demo.digits"),
    }
)


def api_pages(command: str) -> Iterator[tuple[str, str]]:
    """The name of each file under docs/api, and its text; README.md is the index."""
    rows = []
    for page, names in PAGES.items():
        modules = [import_module(name) for name in names]
        rows += [(f"[{code(module.__name__)}]({page}.md#{_anchor(module)})", _first_line(module)) for module in modules]
        yield f"{page}.md", generated(command, ", ".join(names)) + "\n" + "\n".join(map(_module, modules))
    yield "README.md", generated(command, "API reference") + "\n" + table(("module", ""), rows)


def public_names(module: ModuleType) -> list[str]:
    """What a module offers."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [name for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__]
    return [name for name in own if not name.startswith("_")]


def _anchor(module: ModuleType) -> str:
    """Of the heading, as Markdown is shown: without dots."""
    return module.__name__.replace(".", "")


def _first_line(module: ModuleType) -> str:
    return docstring(module, module.__name__).splitlines()[0]


def _module(module: ModuleType) -> str:
    entries = [_entry(module.__name__, name, getattr(module, name)) for name in public_names(module)]
    text = to_markdown(docstring(module, module.__name__))
    return "\n".join([f"## {module.__name__}\n", text, *entries])


def _entry(module: str, name: str, thing: Any) -> str:
    heading = f"### {name}\n"
    home = getattr(thing, "__module__", None) or ""
    if inspect.isclass(thing) and not home.startswith("quark."):
        return "\n".join([heading, f"Taken over from {code(home)}.\n"])
    if inspect.isclass(thing) and thing.__name__ != name:
        return "\n".join([heading, f"Another name of {code(thing.__name__)}.\n"])
    if inspect.isclass(thing):
        return "\n".join([heading, *_class(f"{module}.{name}", thing)])
    if callable(thing) and hasattr(thing, "__name__"):
        return "\n".join([heading, *_function(f"{module}.{name}", name, thing)])
    return "\n".join([heading, f"A constant: {code(type(thing).__name__)}.\n"])


def _function(path: str, name: str, function: Any) -> list[str]:
    return [fenced(name + signature_of(function), "py"), to_markdown(docstring(function, path))]


def _class(path: str, cls: type[Any]) -> list[str]:
    text = to_markdown(docstring(cls, path))
    if issubclass(cls, Enum):
        members = ", ".join(code(name) for name in cls.__members__)
        return [text, f"Members: {members}.\n"]
    if issubclass(cls, BaseException):
        bases = ", ".join(code(base.__name__) for base in cls.__bases__)
        return [f"An error; also {bases}.\n", text]
    parts = [fenced(cls.__name__ + signature_of(cls), "py"), text]
    for name, member in vars(cls).items():
        if not name.startswith("_"):
            parts += _member(f"{path}.{name}", f"{cls.__name__}.{name}", member)
    return parts


def _member(path: str, name: str, member: Any) -> list[str]:
    """A method or property; fields are in the signature of their class."""
    if isinstance(member, property):
        return [f"{code(name)}\n", *_text(path, member)]
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if not inspect.isfunction(member):
        return []
    return [fenced(name + signature_of(member, is_method=True), "py"), *_text(path, member)]


def _text(path: str, member: Any) -> list[str]:
    """What a member's own docstring says; one that says it all by its name needs none."""
    return [to_markdown(docstring(member, path))] if member.__doc__ else []
