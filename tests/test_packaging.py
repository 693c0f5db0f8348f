import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.command_line import scan_array
from tests.images.samples import write_volume
from tests.networks import write_checkpoint
from unet3d import __version__

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "monai", "nibabel", "scipy", "matplotlib", "numpy", "rich")


def python(*arguments, **options):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS = f"""
import sys, unet3d
from unet3d.cli.app import commands
for words in (["--help"], ["train", "--help"], ["config"]):
    commands(words, standalone_mode=False)
print("loaded:", [name for name in {HEAVY} if name in sys.modules])
unet3d.load("network.pt", devices="cpu").segment("scan.nii.gz")
others = ("monai", "matplotlib", "sympy", "tensorboard")
print("loaded:", [name for name in others if name in sys.modules])
import unet3d.training.job  # metrics are for a training's end
print("loaded:", [name for name in ("monai",) if name in sys.modules])
"""


def test_nothing_is_imported_that_only_others_need(tmp_path):
    write_checkpoint(tmp_path / "network.pt", patch_size=(8, 8, 8))
    write_volume(tmp_path / "scan.nii.gz", scan_array())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = python("-c", IMPORTS, cwd=tmp_path, env=environment)
    assert re.findall("^loaded: .*", found, re.MULTILINE) == ["loaded: []"] * 3


@pytest.mark.parametrize("arguments", [["-m", "unet3d"], [str(ROOT / "cli.py")]])
def test_every_way_to_start_it_is_the_same_program(arguments):
    assert python(*arguments, "--version", cwd=ROOT) == f"unet3d {__version__}\n"


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    # In a copy, because building writes beside the sources.
    for name in ("pyproject.toml", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("unet3d", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    python("-c", build, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"unet3d_parallel-{__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    files = {path for path in (ROOT / "unet3d").rglob("*.*") if path.suffix != ".pyc"}
    files.add(ROOT / "unet3d/reports/pages/niivue/LICENSE")
    metadata = f"unet3d_parallel-{__version__}.dist-info/"
    in_package = {name for name in names if not name.startswith(metadata)}
    assert in_package == {str(path.relative_to(ROOT)) for path in files}
    # py.typed tells type checkers to trust the annotations (PEP 561).
    assert {"unet3d/py.typed", "unet3d/__init__.pyi"} <= in_package
    for licence in ("LICENSE", "unet3d/reports/pages/niivue/LICENSE"):
        assert f"{metadata}licenses/{licence}" in names
    entry_points = archive.read(f"{metadata}entry_points.txt").decode()
    assert "unet3d = unet3d.__main__:main" in entry_points


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(path):
    """Return the packages pinned in a file, with versions; every line must be a pin."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [re.fullmatch(r"([\w.-]+)==([^ ;]+)(.*)", line) for line in lines if line]
    assert all(found)
    assert len({normalized(pin[1]) for pin in found}) == len(found)
    return {normalized(pin[1]): (pin[2], pin[3].strip()) for pin in found}


def names_of(requirements):
    return {normalized(Requirement(requirement).name) for requirement in requirements}


def test_dependencies_are_pinned_and_the_lock_of_the_image_has_the_pins_with_hashes():
    pins, lock = pins_of(ROOT / "constraints.txt"), pins_of(ROOT / "requirements-docker.lock")
    of_file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, builder = of_file["project"], of_file["build-system"]["requires"]
    wanted = project["dependencies"]
    assert names_of(sum(project["optional-dependencies"].values(), wanted)) <= pins.keys()
    # Also packages that torch needs for GPUs, which a machine without one does not install.
    of_gpus = {"triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas"}
    of_gpus.add("nvidia-cuda-nvrtc")  # compiles kernels at run time
    for extra in re.findall(r"extras\['(\w+)'\]", (ROOT / "Dockerfile").read_text()):
        wanted = [*wanted, *project["optional-dependencies"][extra]]
    assert names_of([*wanted, *builder]) | of_gpus | {"h5py", "s3fs"} <= lock.keys()
    target = {"python_version": "3.12", "python_full_version": "3.12.14", "extra": ""}
    for name, (version, more) in lock.items():
        assert version == pins[name][0]
        assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} ?)+", more), name
        # Everything that a package needs is in the lock, too.
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # installed with GPUs only
        if importlib.metadata.version(name).partition("+")[0] != version:
            continue  # another version may need other packages
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate(target):
                found, _ = lock[normalized(requirement.name)]
                assert requirement.specifier.contains(found), (name, requirement)


def test_the_lock_is_what_pip_reports():
    spec = importlib.util.spec_from_file_location("lock_docker", ROOT / "tools/lock_docker.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    reported = [
        {
            "metadata": {"name": name, "version": "1.0"},
            "download_info": {"archive_info": {"hashes": {"sha256": digit * 64}}},
        }
        for name, digit in (("b", "1"), ("A", "2"))
    ]
    lines = tool.lock_text(reported).splitlines()[2:]
    assert lines == [f"A==1.0 --hash=sha256:{'2' * 64}", f"b==1.0 --hash=sha256:{'1' * 64}"]
    assert (ROOT / "requirements-docker.lock").read_text().startswith(tool.HEAD)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (__version__, project["license"])
    assert project["description"] in citation["title"]


def instructions():
    """Return the Dockerfile's instructions, with continued lines joined, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line]


def test_the_image_gets_what_the_dockerfile_copies():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert "unet3d" in copied
    assert [rest for word, rest in instructions() if word == "USER"] == ["unet3d"]  # not root
    assert any("--require-hashes -r requirements-docker.lock" in rest for _, rest in instructions())
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


def test_a_user_that_the_image_does_not_know_gets_a_home_of_its_own(tmp_path):
    fonts = tmp_path / "fonts" / "matplotlib"
    fonts.mkdir(parents=True)
    (fonts / "fontlist.json").write_text("{}")
    script = (ROOT / "tools" / "docker-entrypoint.sh").read_text()
    script = script.replace("/opt/unet3d/cache/matplotlib", str(fonts))
    script = script.replace("/tmp/home-", f"{tmp_path}/home-")
    script = script.replace('exec unet3d "$@"', 'echo "$HOME $1"')

    def home_with(home):
        command = ["sh", "-c", script, "sh", "first argument"]
        found = subprocess.check_output(command, env={**os.environ, "HOME": str(home)}, text=True)
        home, _, argument = found.strip().partition(" ")
        assert argument == "first argument"
        return Path(home)

    assert home_with(tmp_path) == tmp_path
    made = home_with(tmp_path / "absent")
    assert made.name.startswith("home-") and made.stat().st_mode & 0o777 == 0o700
    assert (made / ".cache/matplotlib/fontlist.json").read_text() == "{}"


def test_the_scripts_can_be_run():
    scripts = ("demo.sh", "docker-entrypoint.sh", "vendor_niivue.sh")
    for name in (".ci/run", *(f"tools/{script}" for script in scripts)):
        assert os.access(ROOT / name, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / name], check=True)
