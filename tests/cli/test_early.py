"""Errors in paths, devices and settings are reported before PyTorch is imported."""

import json
import os
import subprocess
import sys

from tests.command_line import error_line, process_environment
from tests.images.samples import write_msd

WITHOUT_TORCH = """
import contextlib, io, json, sys
class Refused:
    def find_spec(self, name, *_):
        if name == "torch":
            raise RuntimeError("PyTorch is imported")
sys.meta_path.insert(0, Refused())
from unet3d.cli.app import main
for line in json.load(sys.stdin):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        try:
            main(line.split())
        except SystemExit as ending:
            status = ending.code
    print(json.dumps([status, shown.getvalue()]))
"""

ERRORS = [
    ("train nowhere", "nowhere; give its folder or its dataset.json"),
    ("train data --devices 97", "device '97' does not exist; this machine has cpu and no CUDA"),
    ("train data --devices gpu0", "device 'gpu0' is unknown; write 0, cuda:0 or cpu"),
    ("train nowhere --resume", "no run to resume in runs that was made with "),
    ("train data --parallel model --devices cpu", "needs two devices or more, one for each stage"),
    ("train data --replicas 2 --devices cpu", "--replicas is 2, but there is one device, cpu"),
    ("train data --set data.labels=[heart]", "data.labels names heart, which is not"),
    (
        "train data --folds all --fold 1",
        "--fold and a run over several folds exclude each",
    ),
    ("train --fold 7", "the built-in phantoms have folds 0 to 4, not fold 7; set --fold"),
    ("train --folds 0,7", "--folds names fold 7, but there are 5, counted from 0; name others"),
    ("train data --set training.precision=float16", "training.precision=float16 needs a GPU"),
    ("train --resume --devices 97", "there is no run to resume in runs; name one with"),
    ("train data --set training.epoch=3", "training.epoch, did you mean training.epochs?"),
    ("train data --init missing.pt", "missing.pt: No such file or directory; name one"),
    ("train data --init text.pt", "text.pt is not a checkpoint; name one, the folder of a run"),
    ("train data --config missing.yaml", "missing.yaml: No such file or directory; name a YAML"),
    ("train data -o text.pt", "cannot write to text.pt: Not a directory"),
    ("train data -o full", "full is not empty and is not a run: it holds file"),
    ("predict CT/", "there is no file or folder CT; name a scan, or a folder"),
    ("predict text.pt", "text.pt has no known file ending"),
    ("predict scan.nii.gz -o seg.png", "seg.png: a segmentation ends in .nii.gz or .nii"),
    ("predict scan.nii.gz -o text.pt/", "text.pt is not a writable folder; choose another"),
    ("predict scan.nii.gz -o text.pt/seg.nii", "text.pt is not a writable folder"),
    ("predict scan.nii.gz -o there.nii", "there.nii exists; add --overwrite to replace it"),
    ("predict full", "full holds no volumes to segment"),
    ("predict scan.nii.gz -c text.pt", "text.pt is not a checkpoint; name one"),
    ("predict scan.nii.gz -c full", "full holds no checkpoint: neither checkpoint-latest.pt"),
    ("predict scan.nii.gz --crop :,:,:4", "cannot be written in blocks; leave out --crop, or na"),
    ("predict scan.nii.gz -o x.ome.zarr --mask missing.nii", "cannot read missing.nii: No such"),
    ("predict scan.nii.gz --parallel none --devices cpu,cpu", "parallel mode none uses one"),
    ("predict scan.nii.gz --precision float16", "--precision=float16 needs a GPU; use --prec"),
    ("predict scan.nii.gz -o pipe.nii", "cannot write pipe.nii: it is not a regular file"),
    ("predict scan.nii.gz -o taken --overwrite", "cannot write taken/scan.nii.gz: it is not a reg"),
    ("predict scan.nii.gz --devices 97", "device '97' does not exist"),
    ("predict scan.nii.gz", " has no finished run; name a checkpoint"),
    ("plan --devices 0,cpu", "cuda:0 is not on this machine, so its memory is unknown"),
    ("plan --measure --devices 97", "device '97' does not exist"),
    ("plan nowhere", "nowhere; give its folder"),
    ("plan --predict scan.nii.gz --devices 97", "device '97' does not exist"),
    ("plan --predict CT/", "there is no file or folder CT"),
    ("check nowhere", "there is no data set at nowhere"),
    ("evaluate missing.nii.gz data", "there is no file or folder missing.nii.gz"),
    ("evaluate text.pt text.pt", "text.pt has no known file ending"),
    ("evaluate data/imagesTr data/labelsTr/case_0.nii.gz", "has no label map in data/labelsTr"),
    ("evaluate scan.nii.gz scan.nii.gz --json pipe.nii", "pipe.nii cannot hold the results"),
    ("report scan.nii.gz --image missing.nii", "cannot read missing.nii: No such file"),
    ("convert text.pt -o model.pt", "text.pt is not a checkpoint"),
]


def test_an_error_does_not_wait_for_pytorch_and_leaves_nothing(tmp_path):
    write_msd(tmp_path / "data")
    (tmp_path / "full").mkdir()
    (tmp_path / "taken/scan.nii.gz").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.nii")
    for name in ("text.pt", "full/file", "there.nii"):
        (tmp_path / name).write_text("text")
    (tmp_path / "scan.nii.gz").symlink_to(min(tmp_path.glob("data/imagesTr/*")))
    before = {path.name for path in tmp_path.iterdir()}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    lines = json.dumps([line for line, _ in ERRORS])
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        env=process_environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for (line, words), shown in zip(ERRORS, done.stdout.splitlines(), strict=True):
        status, errors = json.loads(shown)
        assert status == 1 and words in error_line(errors), line
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == before  # cache: Matplotlib's
