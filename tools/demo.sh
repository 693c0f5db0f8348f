#!/usr/bin/env bash
# A complete example on built-in data: train a U-Net on two devices, segment an unseen scan, compare
# with the truth. All output is in demo/. Run it with: make demo
set -euo pipefail
cd "$(dirname "$0")/.."

devices=$(python -c '
import torch
print({0: "cpu,cpu", 1: "0,0"}.get(torch.cuda.device_count(), "0,1"))
')

rm -rf demo/run
unet3d train --config configs/quickstart.yaml --parallel model --devices "$devices" \
    --output demo/run

# A seed that differs from the training data gives new heads.
python -c '
from pathlib import Path
from unet3d.datasets.phantom import write_phantom_dataset
write_phantom_dataset(Path("demo/unseen"), 1, (64, 64, 64), (1.0, 1.0, 1.0), seed=2024)
'
unet3d predict demo/unseen/imagesTr/phantom_000.nii.gz --checkpoint demo/run \
    --parallel model --devices "$devices" -o demo/scan_seg.nii.gz --preview --overwrite
unet3d evaluate demo/scan_seg.nii.gz demo/unseen/labelsTr/phantom_000.nii.gz \
    --json demo/evaluation.json --overwrite

echo "
Labels: 1 brain, 2 ventricles, 3 lesion.
Look at  demo/run/progress.png           loss and Dice during training
         demo/run/memory.png             memory of each device
         demo/run/validation/worst.png   the validation case with the lowest Dice, beside its labels
         demo/scan_seg.nii.gz            the segmentation of demo/unseen/imagesTr/phantom_000.nii.gz
         demo/scan_seg.png               the same as a picture"
