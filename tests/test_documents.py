"""The documents: their commands run, their Python does what it says, their links lead somewhere.

Fenced blocks of ``bash`` or ``python`` run in a folder with the files that the documents name. If
a block needs more than this machine has, a comment before it says so: ``<!-- needs: GPU -->``.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.command_line import SMALL, run, scan_array
from tests.images.dicom_series import write_slice
from tests.images.samples import blob_label, write_json, write_msd, write_volume
from tests.networks import write_checkpoint
from unet3d.cli.app import commands
from unet3d.cli.command import Command
from unet3d.datasets.phantom import write_phantom_dataset

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "data/README.md")
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = ROOT / "tests/recorded/nnunet/isotropic/nnUNetTrainer__nnUNetPlans__3d_fullres"
NEEDS = {
    *("GPU", "Docker", "Slurm", "several machines", "TensorBoard", "napari", "a download"),
    "a process of its own",
}
MICROSCOPY = {"microscopy.png", "napari.png", "imagej.png"}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
BLOCK = re.compile(
    r"(?:^<!-- needs: ([\w ]+) -->\n)?^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code in a document."""

    needs: str
    language: str
    text: str

    def commands(self):
        """Return each command as a list of words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(document):
    return [Block(*found.groups(default="")) for found in BLOCK.finditer(document.read_text())]


def with_blocks(language):
    """Return the documents that have blocks to run."""
    return [
        pytest.param(document, id=str(document.relative_to(ROOT)))
        for document in DOCUMENTS
        if any(block.language == language and not block.needs for block in blocks_of(document))
    ]


def on_cpus(devices):
    """Return as many CPUs as a list of GPUs has, because there may be no GPUs."""
    names = devices.split(",")
    return ",".join("cpu" if name.isdigit() else name for name in names)


def shortened(words):
    """Return a command of unet3d with smaller numbers, which does the same."""
    words = list(words)
    for option, smaller in (("--epochs", "2"), ("--window", "8,8,8")):
        if option in words and words[words.index(option) + 1] != "whole":
            words[words.index(option) + 1] = smaller
    if "--devices" in words and "--device-memory" not in words:
        place = words.index("--devices") + 1
        words[place] = on_cpus(words[place])
    if "--folds" in words and words[words.index("--folds") + 1] == "all":
        words[words.index("--folds") + 1] = "0,1"
    if words[0] == "train" and "--resume" not in words:
        if len(words) == 1 or words[1].startswith("-"):  # no data set named: phantoms
            words += ["--set", "data.phantom_shape=16,16,16"]
        given = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--set"}
        if "--micro-batches" in words:  # the batch is planned for them
            given.add("training.batch_size")
        for option, value in zip(SMALL[::2], SMALL[1::2], strict=True):
            key = value.partition("=")[0]
            is_given = key in given if option == "--set" else option in words
            if not is_given and not (key.startswith("model.") and "--init" in words):
                words += [option, value]
    return words


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the files that documents name: data sets, scans, runs, a model of nnU-Net."""
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_msd(folder / "DATASET", num_cases=5)
        for kind in ("images", "labels"):
            shutil.copytree(f"DATASET/{kind}Tr", f"DATASET/{kind}Ts")
        shutil.copytree("DATASET/imagesTr", "scans")
        for name in ("scan.nii.gz", "other.nii.gz"):
            shutil.copy("scans/case_0.nii.gz", name)
        shutil.copy("DATASET/labelsTr/case_0.nii.gz", "truth.nii.gz")
        pixels = np.arange(12 * 14, dtype=np.int16).reshape(12, 14)
        for number in range(10):
            write_slice(
                folder / f"CT/{number}.dcm",
                pixels + number,
                ImagePositionPatient=[0, 0, number],
                SOPInstanceUID=f"1.2.{number}",
            )
        write_phantom_dataset(folder / "demo/unseen", 1, (16, 16, 16), (1.0, 1.0, 1.0), seed=1)
        for name in ("MODEL", MODEL.name):
            shutil.copytree(MODEL, name)
        (folder / "configs").symlink_to(ROOT / "configs")
        assert run("train", "DATASET", "-o", "runs/mine", *SMALL) == 0
        shutil.copytree("runs/mine", "runs/other")
        assert run("train", "DATASET", "-o", "runs/folds", "--folds", "0,1", *SMALL) == 0
        assert run("predict", "scans", "-c", "MODEL", "-o", "nnunet_segmentations") == 0
    return folder


def write_cells(folder):
    """Write a data set of TIFF stacks, and a volume in each format, of voxels of 8x8x40 nm."""
    tifffile, zarr, h5py = map(pytest.importorskip, ("tifffile", "zarr", "h5py"))
    stated = {"imagej": True, "resolution": (1 / 8, 1 / 8)}
    stated["metadata"] = {"axes": "ZYX", "spacing": 40.0, "unit": "nm"}
    for number in range(5):
        labels = blob_label((10, 14, 12), number)
        image = np.random.default_rng(number).normal(100, 10, labels.shape) + 50 * labels
        for kind, array in (("imagesTr", image.astype(np.uint8)), ("labelsTr", labels)):
            path = folder / f"CELLS/{kind}/block_{number}{'_0000' * (kind == 'imagesTr')}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(path, array, **stated)
    description = {"channel_names": {"0": "EM"}, "file_ending": ".tif"}
    description["labels"] = {"background": 0, "membrane": 1, "mitochondrion": 2}
    write_json(folder / "CELLS/dataset.json", description)
    image = image.astype(np.uint8)
    shutil.copy(folder / "CELLS/imagesTr/block_4_0000.tif", folder / "stack.tif")
    (folder / "slices").mkdir()
    for number, plane in enumerate(image):
        tifffile.imwrite(folder / f"slices/z{number}.tif", plane)
    with h5py.File(folder / "scan.h5", "w") as file:
        file["raw"] = image
        file["raw"].attrs["element_size_um"] = (0.04, 0.008, 0.008)
    group = zarr.open_group(folder / "scan.ome.zarr", mode="w")
    levels = []
    for level in range(2):
        group[str(level)] = image[:, :: 2**level, :: 2**level]
        scale = {"type": "scale", "scale": [40.0, 8.0 * 2**level, 8.0 * 2**level]}
        levels.append({"path": str(level), "coordinateTransformations": [scale]})
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    multiscales = [{"axes": axes, "datasets": levels}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": multiscales}


def failures_in(document):
    """Run the commands of a document in this folder; yield failing ones with their errors."""
    for block in blocks_of(document):
        for program, *words in block.commands() if block.language == "bash" else ():
            if block.needs or program == "source":
                continue
            if program == "unet3d":
                words = shortened(words)
                if "--resume" not in words and words[0] == "train" and "-o" in words:
                    shutil.rmtree(words[words.index("-o") + 1], ignore_errors=True)
                target = words.pop() if ">" in words else os.devnull
                words = [word for word in words if word != ">"]
                errors = io.StringIO()
                with open(target, "w") as file, redirect_stdout(file), redirect_stderr(errors):
                    status = run(*words)
                if status != 0:
                    yield shlex.join(words), errors.getvalue()[-300:]
            elif program == "make":  # CI runs the targets; here they must exist
                subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
            elif program == "pytest":
                assert (ROOT / words[0]).exists()
            elif [program, *words[:-1]] != ["pip", "install", "-c", "constraints.txt"]:
                yield shlex.join([program, *words]), "is run by no test, and not marked"


@pytest.mark.parametrize("document", with_blocks("bash"))
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_commands_run(document, prepared, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    if document.stem == "microscopy":
        write_cells(folder)
        assert run("train", "CELLS", "-o", "runs/cells", *SMALL) == 0
    assert not list(failures_in(document))


@pytest.mark.parametrize("document", with_blocks("python"))
def test_python_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_msd(tmp_path / "DATASET")
    write_checkpoint(tmp_path / "runs/mine/checkpoint-latest.pt", patch_size=(8, 8, 8))
    for name in ("scan.nii.gz", "other.nii.gz"):
        write_volume(tmp_path / name, scan_array())
    names = {}
    for block in blocks_of(document):
        if block.language == "python" and not block.needs:
            small = '": 1, "training.steps_per_epoch": 1}'
            exec(re.sub(r'(?<="training.epochs)": \d+}', small, block.text), names)
        elif block.language == "python":
            subprocess.run([sys.executable, "-c", block.text], check=True, timeout=60)


def test_what_blocks_need_is_known():
    needed = {block.needs for document in DOCUMENTS for block in blocks_of(document)}
    assert needed - {""} <= NEEDS
    for document in DOCUMENTS:
        fences = re.findall(r"^```(\w*)$", document.read_text(), re.MULTILINE)
        assert set(fences) <= {"", "bash", "python", "json", "yaml"}, document


def test_commands_parse_and_their_settings_exist():
    """Each ``unet3d ...`` line in documents and configurations, also in blocks that are not run."""
    shown = set()
    for document in [*DOCUMENTS, ROOT / "tools" / "demo.sh", *(ROOT / "configs").glob("*.yaml")]:
        text = re.sub(r"\\\n#? *", "", document.read_text())
        for line in text.splitlines():
            in_another = r"(?:docker run|torchrun) .* (?:-m unet3d|unet3d-parallel)"
            match = re.match(rf"(?:#\s+)?(?:unet3d|{in_another}) (?!=)([a-z-].*)", line)
            if not match or "..." in line:
                continue
            name, *arguments = shlex.split(match[1].partition(" > ")[0], comments=True)
            command = commands.get_command(None, name)
            if command is None:  # a sentence that begins with unet3d
                assert document.suffix == ".md" and line.endswith((".", ":", ",")), (document, line)
                continue
            shown.add(name)
            parsed = command.make_context(name, arguments).params
            # Settings and configurations in the lines exist.
            if "--resume" in arguments or not isinstance(command, Command):
                continue
            if (path := parsed.get("config_path")) is not None:
                if not (ROOT / path).exists():
                    continue
                parsed["config_path"] = ROOT / path
            if "settings" in (given := command.with_settings(parsed)):
                assert given["settings"].config
    assert {"train", "predict", "evaluate", "check", "convert", "plan", "report"} <= shown


def test_links_lead_to_files_and_what_is_named_exists():
    folders = "unet3d|tests|benchmarks|docs|tools|data|configs"
    packages = "|".join(path.name for path in (ROOT / "unet3d").iterdir() if path.is_dir())
    for document in DOCUMENTS:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert link.startswith("http") or (document.parent / link).exists(), (document, link)
        for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            assert (ROOT / name).exists(), (document, name)
        for name in re.findall(rf"`((?:{packages})/[\w/]+)`", text):
            module = ROOT / "unet3d" / name
            assert module.is_dir() or module.with_suffix(".py").is_file(), (document, name)


def pictures_shown():
    """Return the names of the pictures that documents show."""
    shown = r"!\[[^]]+\]\(([^)]+)\)"
    return {Path(link).name for page in DOCUMENTS for link in re.findall(shown, page.read_text())}


def test_every_picture_is_shown_and_drawn_by_a_script():
    docs = ROOT / "docs"
    pictures = [path for path in docs.iterdir() if path.suffix in (".png", ".svg")]
    assert {path.name for path in pictures} == pictures_shown()
    assert sum(path.stat().st_size for path in pictures) <= 900_000
    scripts = "".join(path.read_text() for path in docs.glob("draw_*.py"))
    # The frontier was measured on a GPU, and cannot be drawn anew.
    assert {name for name in pictures_shown() if name not in scripts} == {"frontier.png"}


@pytest.mark.nightly
def test_the_preview_of_microscopy_is_drawn(tmp_path):
    """Pictures of other programs need these programs, and a display."""
    for name in ("tifffile", "zarr"):
        pytest.importorskip(name)
    script = [sys.executable, ROOT / "docs/draw_microscopy.py", tmp_path, "--epochs", "1"]
    script += ["--set", "training.steps_per_epoch=1", "--set", "model.base_channels=4"]
    environment = {name: os.environ[name] for name in os.environ.keys() - {"DISPLAY"}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    (drawn,) = tmp_path.iterdir()
    assert drawn.name in MICROSCOPY
    assert len(np.unique(matplotlib.image.imread(drawn))) > 50


@pytest.mark.nightly
@pytest.mark.skipif(not any(map(shutil.which, CHROMIUMS)), reason=f"none of {CHROMIUMS}")
def test_the_pictures_of_the_product_are_drawn(tmp_path):
    pytest.importorskip("playwright")
    settings = ("training.steps_per_epoch=2", "model.base_channels=4", "model.num_levels=2")
    settings += ("patches.size=16,16,16", "data.phantom_shape=24,24,24")
    smaller = [word for setting in settings for word in ("--set", setting)]
    script = [sys.executable, ROOT / "docs/draw_tour.py", tmp_path, "--epochs", "2", *smaller]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    by_others = {"frontier.png", "slabs.svg", "two-devices.svg", *MICROSCOPY}
    assert {path.name for path in tmp_path.iterdir()} == pictures_shown() - by_others
    for path in tmp_path.glob("*.png"):
        assert len(np.unique(matplotlib.image.imread(path))) > 50, path
    terminal = (tmp_path / "terminal.svg").read_text()
    assert "unet3d&#160;train" in terminal and "/2&#160;" in terminal and "url(http" not in terminal


def test_every_answer_is_linked_from_the_list_of_questions():
    pages = ROOT / "docs" / "how-do-i"
    linked = set(re.findall(r"\]\((\w+\.md#[\w-]+)\)", (pages / "index.md").read_text()))
    answers = set()
    for page in pages.glob("*.md"):
        if page.name != "index.md":
            for heading in re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE):
                words = re.sub(r"[^\w\s-]", "", heading.lower()).split()
                answers.add(f"{page.name}#{'-'.join(words)}")
    assert linked == answers and len(answers) >= 40


def test_sizes():
    """README is read to its end, and pages must be short enough to be read at once."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150 and len(readme.split()) <= 1100
    pages = {page: page.stat().st_size for page in (ROOT / "docs").rglob("*.md")}
    assert max(pages.values()) <= 12_000 and sum(pages.values()) <= 133_000
