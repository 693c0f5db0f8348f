"""Write requirements-docker.lock: what the Docker image installs, each wheel with its hash.

The versions are those of constraints.txt. Run it with Python 3.12 after changing them, or the
dependencies in pyproject.toml; it downloads torch and CUDA, about 3 GB::

    python3.12 tools/lock_docker.py
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-docker.lock"
PYTHON = (3, 12)
EXTRAS = ("microscopy", "remote", "tensorboard")
"""Extras that the image has; the Dockerfile names them, too."""
NEWEST_GLIBC = 36
"""Minor version of glibc 2 for which wheels may be built."""

HEAD = """\
# What the Docker image installs: Python 3.12, Linux on x86-64, each wheel with its hash.
# Made from constraints.txt by python3.12 tools/lock_docker.py; do not edit it.
"""


def resolved(requirements: list[str]) -> list[dict[str, Any]]:
    """Return what pip would install for requirements and their dependencies.

    Args:
        requirements: As in ``pyproject.toml``.
    """
    tags = ["linux", "manylinux1", "manylinux2010", "manylinux2014"]
    tags += [f"manylinux_2_{minor}" for minor in range(5, NEWEST_GLIBC + 1)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += ["--report", str(report), "--constraint", str(ROOT / "constraints.txt")]
        command += [f"--platform={tag}_x86_64" for tag in tags]
        subprocess.run([*command, *requirements], check=True)
        installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installed


def lock_text(installed: list[dict[str, Any]]) -> str:
    """Return the lock file for what pip would install.

    Args:
        installed: The entries of pip's report.
    """
    lines = []
    for entry in installed:
        name, version = entry["metadata"]["name"], entry["metadata"]["version"]
        digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return HEAD + "".join(sorted(lines, key=str.lower))


def main() -> None:
    """Resolve the image's dependencies and the setuptools that builds it, and write the lock."""
    if sys.version_info[:2] != PYTHON:
        sys.exit("the image has Python 3.12, and what it needs depends on that; use python3.12")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    LOCK.write_text(lock_text(resolved([*project["dependencies"], *of_extras, "setuptools"])))


if __name__ == "__main__":
    main()
