"""`quark doctor`'s checks together, on this environment and on broken ones."""

import subprocess
import sys

import pytest

from quark.report import environment
from quark.report.environment import examine, is_healthy
from quark.report.installation import Finding, Health


def test_this_environment_is_healthy():
    findings = examine()
    assert is_healthy(findings), [finding for finding in findings if finding.health is Health.BROKEN]
    names = {finding.check for finding in findings}
    assert {"python", "quark", "numpy", "onnx", "onnxruntime", "native library", "custom operator", "memory"} <= names


def test_a_check_that_raises_is_a_finding_and_hides_no_other(monkeypatch):
    def explode():
        yield from ()
        raise OSError("cannot load")

    monkeypatch.setattr(environment, "CHECKS", (("first", explode), *environment.CHECKS[:1]))
    findings = examine()
    assert findings[0].health is Health.BROKEN
    assert "cannot load" in findings[0].detail
    assert len(findings) > 1


def test_a_warning_is_healthy():
    assert is_healthy([Finding("a", Health.WARNING, ""), Finding("b", Health.INFO, "")])
    assert not is_healthy([Finding("a", Health.OK, ""), Finding("b", Health.BROKEN, "")])


@pytest.mark.parametrize("module", ["numpy", "onnx", "rich"])
def test_the_command_works_where_a_package_does_not_import(module):
    """In a process of its own: there nothing was imported before."""
    hide = f"import sys; sys.modules['{module}'] = sys.modules['torch'] = None"  # torch takes seconds
    code = f"{hide}; from quark.cli.main import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.split()[1] == module)
    assert line.startswith("BROKEN")
    assert "ok       text" in done.stdout
    assert "Traceback" not in done.stderr
