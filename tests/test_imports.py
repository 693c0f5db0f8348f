"""How much of the package a command needs: modules whose functions run, and modules it imports.

Ceilings must only be lowered: to understand a command, one has to read every module that runs. Two
more are allowed, which other CPUs need.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import unet3d
from tests.command_line import SMALL, process_environment, scan_array
from tests.images.samples import write_volume

COUNT = """
import ast, contourpy, monai.metrics, nibabel, os, scipy.ndimage, sys, tensorboard, threading
import torch._dynamo, torch.distributed, matplotlib.figure

matplotlib.figure.Figure.savefig = lambda *_, **__: None  # drawing takes long

def counted(words):
    ran = set()
    def note(frame, event, argument):
        code = frame.f_code
        if code.co_flags & 1 and not code.co_name.startswith("<"):  # no body of a module, a class
            ran.add(code.co_filename)
    threading.settrace(note)
    sys.settrace(note)
    from unet3d.cli.app import main
    sys.argv = words
    try:
        main()
    except SystemExit as ending:
        assert not ending.code, ending.code
    sys.settrace(None)
    import unet3d
    root = unet3d.__path__[0] + "/"
    modules = [name for name in ran if name.startswith(root) and name.endswith(".py")]
    loaded = [name for name in sys.modules if name.partition(".")[0] == "unet3d"]
    print("counted", len(modules), len(loaded), flush=True)

for words in ast.literal_eval(sys.argv[1]):
    if not os.fork():
        counted(words)
        os._exit(0)
    os.wait()
"""
"""Each command runs in a fork of a process that has imported other packages only."""


def test_commands_take_no_more_of_the_package_than_before(tmp_path):
    phantoms = ("--set", "data.phantom_shape=16,16,16")
    run = tmp_path / "run"
    scan = write_volume(tmp_path / "scan.nii.gz", scan_array())
    commands = {
        ("train", *SMALL, *phantoms, "--output", run): (155, 215),
        ("predict", scan, "--checkpoint", run): (99, 157),
        ("report", run): (20, 39),
    }
    words = [["unet3d", *map(str, command)] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(words)],
        capture_output=True,
        text=True,
        env=process_environment(),
        timeout=240,
    )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("counted")]
    assert len(found) == len(commands), done.stderr
    for (command, most), numbers in zip(commands.items(), found, strict=True):
        assert all(int(one) <= limit for one, limit in zip(numbers, most, strict=True)), (
            f"{command[0]}: {numbers} modules run and are loaded, at most {most}"
        )


def imported(node: ast.AST) -> Iterator[str]:
    """Yield what code imports, also inside functions, but not for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imported(child)


def test_no_modules_import_each_other():
    root = Path(unet3d.__file__).parent
    files = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): path
        for path in root.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    assert len(files) > 200
    graph = {}
    for name, path in files.items():
        found = set(imported(ast.parse(path.read_text())))
        graph[name] = {one if one in files else one.rpartition(".")[0] for one in found} - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
