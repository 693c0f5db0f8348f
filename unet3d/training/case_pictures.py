"""Pictures of the worst and the best validation case: what was predicted, and what is true."""

from collections.abc import Sequence
from pathlib import Path

from unet3d.datasets.dataset import Case
from unet3d.datasets.labels import values_of
from unet3d.images.image import open_image
from unet3d.images.labels import on_grid_of
from unet3d.images.memory_limits import explaining_memory
from unet3d.inference.evaluation import CaseScores, Evaluation, read_pair
from unet3d.reports.figures import write_figure
from unet3d.reports.planes import Structure
from unet3d.reports.preview import Preview, preview_figure
from unet3d.runs.run_folder import BEST, WORST


def draw_extremes(folder: Path, evaluation: Evaluation, cases: Sequence[Case]) -> None:
    """Draw the case with the lowest mean Dice, and of several the one with the highest."""
    images = {case.name: case.images[0] for case in cases}
    scored = [case for case in evaluation.cases if case.mean_dice is not None]
    chosen = {}
    if scored:
        which = "The only case" if len(scored) == 1 else f"Worst of {len(scored)} cases"
        chosen[WORST] = which, scored[0]
    if len(scored) > 1:
        chosen[BEST] = f"Best of {len(scored)} cases", scored[-1]
    for name, (which, case) in chosen.items():
        title = f"{which}, mean Dice {case.mean_dice:.3f}: {case.name}"
        with explaining_memory(f"cannot draw {case.name}"):
            preview = _preview(title, folder, images[case.name], case, evaluation)
            write_figure(preview_figure(preview), folder / name)


def _preview(
    title: str, folder: Path, image_path: Path, case: CaseScores, evaluation: Evaluation
) -> Preview:
    image = open_image(image_path)
    prediction, label = read_pair(folder / case.prediction, case.label)
    if evaluation.scored.ignore is not None:
        prediction.array[label.array == evaluation.scored.ignore] = 0
    return Preview(
        title=title,
        image=image,
        labels=on_grid_of(image.geometry, prediction).array,
        truth=on_grid_of(image.geometry, label).array,
        structures=[
            Structure(name=evaluation.name_of(one), values=values_of(one))
            for one in evaluation.labels
        ],
        dice=[case.scores[one].dice for one in evaluation.labels],
    )
