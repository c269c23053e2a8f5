"""The image's recipe, as far as it can be followed without Docker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "deploy" / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) (.*)$", re.sub(r" *\\\n *", " ", RECIPE), re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(kind: str) -> list[str]:
    return [text for name, text in STEPS if name == kind]


def test_what_is_copied_is_there_and_sent_along() -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    copied = [shlex.split(text)[:-1] for text in steps("COPY") if "--from" not in text]
    assert copied
    for name in {name for names in copied for name in names}:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored


def test_it_does_not_run_as_root_but_as_the_charts_user() -> None:
    user, group = steps("USER")[-1].split(":")
    values = yaml.safe_load((ROOT / "deploy/helm/kvbaton/values.yaml").read_text())
    assert int(user) == values["podSecurityContext"]["runAsUser"] != 0
    assert int(group) == values["podSecurityContext"]["runAsGroup"]
    assert any(f"--uid {user}" in text for text in steps("RUN"))


def test_it_starts_our_command() -> None:
    assert json.loads(steps("ENTRYPOINT")[-1]) == ["kvbaton"]
    assert "kvbaton" in PROJECT["scripts"]


def test_versions_are_held_to_the_constraints() -> None:
    fetching = [text for text in steps("RUN") if "pip install" in text]
    assert all("-c constraints.txt" in text or "--no-deps" in text for text in fetching)


def test_the_dependencies_are_the_projects() -> None:
    (step,) = (text for text in steps("RUN") if "tomllib" in text)
    words = shlex.split(step.partition(">")[0])
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == PROJECT["dependencies"]


def test_it_has_what_flags_of_the_chart_may_ask_for() -> None:
    """Nothing can be installed into a container with a read-only root."""
    (step,) = (text.split() for text in steps("RUN") if "-r requirements.txt" in text)
    for extra in ("redis", "s3", "otel"):
        for needed in PROJECT["optional-dependencies"][extra]:
            assert re.split("[<>=]", needed)[0] in step


def test_the_wheel_has_all_that_is_needed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvbaton", source / "kvbaton", ignore=ignore)
    words = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [sys.executable, *words, "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        packed = set(files.namelist())
    for path in (source / "kvbaton").rglob("*"):
        if path.suffix in (".py", ".json", ".typed"):
            assert str(path.relative_to(source)) in packed, path
