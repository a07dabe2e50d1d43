"""The examples of a page in Markdown, run from top to bottom in one folder and one namespace.

    ```python     a session (>>>), whose output is compared ("..." is anything); or a program, which only has to run
    ```console    lines "$ quark ..." with what they print; "; echo $?" at the end shows the exit status, else it is 0
    ```yaml       a file, where the first line is a comment with its name: # my.yaml

What a command prints is compared without regard to white space and to the digits of numbers with a decimal point:
another processor rounds otherwise. "..." stands for anything.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

from commands import run as run_command

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(python|console|yaml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STATUS = "; echo $?"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_page(page: Path, folder: Path) -> int:
    """Run all examples with `folder` as the working folder, which the caller sets; how many blocks there were."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    for kind, text in blocks:
        if kind == "console":
            _run_console(text)
        elif kind == "yaml":
            _write_yaml(text, folder)
        elif text.startswith(">>> "):
            namespace = _run_session(text, namespace, page.name)
        else:
            exec(compile(text, page.name, "exec"), namespace)
    return len(blocks)


def examples_of(text: str) -> tuple[str, ...]:
    """The blocks of a page, or of a part of it, that `run_page` runs."""
    return tuple(block for _, block in BLOCK.findall(text))


def links_of(page: Path) -> list[str]:
    """The relative links of a page, as they are written; not those inside of code."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them: repeated ones are numbered."""
    if page.suffix != ".md":
        return set()
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    found: dict[str, int] = {}
    anchors = set()
    for heading in headings:
        anchor = (
            re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip().replace(" ", "-")
        )
        count = found.get(anchor, 0)
        found[anchor] = count + 1
        anchors.add(f"{anchor}-{count}" if count else anchor)
    return anchors


def _run_session(text, namespace, name):
    session = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, clear_globs=False)
    assert result.failed == 0, f"{name}: {result.failed} examples of a session failed; the output above says which"
    return session.globs


def _write_yaml(text, folder):
    name = re.match(r"# (\S+\.yaml)\n", text)
    if name:
        (folder / name.group(1)).write_text(text)


def _run_console(text):
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.replace("\\\n", "").partition("\n")
        has_status = command.endswith(STATUS)
        program, *arguments = shlex.split(command.removesuffix(STATUS))
        assert program == "quark", f"'{command}': only quark commands are run; indent others as plain text"
        result = run_command(*arguments)
        printed = result.output + (f"{result.exit_code}\n" if has_status else "")
        assert has_status or result.exit_code == 0, f"$ {command}\n{printed}"
        assert not expected.strip() or _is_like(expected, printed), f"$ {command}\n{printed}\nexpected\n{expected}"


def _is_like(expected, printed):
    wanted, got = (re.sub(r"\d+\.\d+", "0.0", value) for value in (expected, printed))
    return doctest.OutputChecker().check_output(wanted, got, OPTIONS)
