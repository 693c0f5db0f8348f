"""Draw docs/two-devices.svg, a picture of concepts/pipeline.md: python docs/draw_two_devices.py."""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ENCODER, DECODER, COPY = "#0072B2", "#D55E00", "#333333"
CHANNELS = (32, 64, 128, 256)
LEVEL_HEIGHT, BLOCK_HEIGHT, STEP = 1.5, 0.8, 0.42
LEFT, RIGHT, WIDEST = 0.6, 15.4, 4.6


def draw() -> Figure:
    """Return the picture: encoder on one device, decoder on the other, skips between them."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-1.4, 17.4)
    axes.set_ylim(-7.0, 1.8)
    _device(axes, 0.1, "device 0: encoder", ENCODER)
    _device(axes, 8.7, "device 1: decoder and head", DECODER)
    lowest = len(CHANNELS) - 1
    for level, channels in enumerate(CHANNELS):
        y, width = -level * LEVEL_HEIGHT, WIDEST - level * STEP
        left = LEFT + level * STEP
        _block(axes, left, y, width, ENCODER, f"level {level}: {channels} channels")
        if level < lowest:
            right = RIGHT - level * STEP
            _block(axes, right - width, y, width, DECODER, f"level {level}: {channels} channels")
            _arrow(axes, (left + width, y), (right - width, y), COPY, f"skip {level}")
            middle = left + width / 2 + STEP / 2
            _arrow(
                axes,
                (middle, y - BLOCK_HEIGHT / 2),
                (middle, y - LEVEL_HEIGHT + BLOCK_HEIGHT / 2),
                ENCODER,
            )
        if 0 < level < lowest:
            middle = RIGHT - level * STEP - width / 2 - STEP / 2
            _arrow(
                axes,
                (middle, y + BLOCK_HEIGHT / 2),
                (middle, y + LEVEL_HEIGHT - BLOCK_HEIGHT / 2),
                DECODER,
            )
    y = -lowest * LEVEL_HEIGHT
    corner = RIGHT - (lowest - 1) * STEP - (WIDEST - (lowest - 1) * STEP) / 2
    end_of_encoder = LEFT + lowest * STEP + WIDEST - lowest * STEP
    axes.plot([end_of_encoder, corner], [y, y], color=COPY, linewidth=2)
    _arrow(axes, (corner, y), (corner, y + LEVEL_HEIGHT - BLOCK_HEIGHT / 2), COPY)
    _arrow(axes, (-0.6, 0), (LEFT, 0), COPY)
    _arrow(axes, (RIGHT, 0), (RIGHT + 1.2, 0), COPY)
    axes.text(-0.7, 0, "volume", ha="right", va="center", fontsize=11, rotation=90)
    axes.text(RIGHT + 1.3, 0, "labels", ha="left", va="center", fontsize=11, rotation=90)
    axes.text(
        8,
        -6.8,
        "One network, one checkpoint. Each device keeps only the activations of its own blocks;\n"
        "each skip is copied once, straight to the device that uses it.",
        ha="center",
        fontsize=11,
    )
    return figure


def _device(axes: Axes, left: float, name: str, colour: str) -> None:
    box = FancyBboxPatch(
        (left, -5.4),
        7.2,
        6.2,
        boxstyle="round,pad=0,rounding_size=0.3",
        facecolor=colour,
        edgecolor=colour,
        alpha=0.1,
    )
    axes.add_patch(box)
    axes.text(left + 3.6, 1.15, name, ha="center", fontsize=14, weight="bold", color=colour)


def _block(axes: Axes, left: float, y: float, width: float, colour: str, text: str) -> None:
    box = FancyBboxPatch(
        (left, y - BLOCK_HEIGHT / 2),
        width,
        BLOCK_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=colour,
        edgecolor="none",
    )
    axes.add_patch(box)
    axes.text(left + width / 2, y, text, ha="center", va="center", fontsize=10, color="white")


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, text: str = ""
) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
    if text:
        axes.text((start[0] + end[0]) / 2, start[1] + 0.12, text, ha="center", fontsize=10)


if __name__ == "__main__":
    rcParams["svg.hashsalt"] = "unet3d"  # the same file from the same drawing
    picture = Path(__file__).with_name("two-devices.svg")
    draw().savefig(picture, metadata={"Date": None}, facecolor="white")
