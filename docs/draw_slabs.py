"""Draw docs/slabs.svg, the picture of concepts/slabs.md: python docs/draw_slabs.py."""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

DEVICES = ("#0072B2", "#D55E00", "#009E73")
LINE, ZEROS = "#333333", "#888888"
MAP_HEIGHT, HALO, GAP = 0.75, 0.2, 0.34
ENCODER, MIDDLE, DECODER = 4.6, 10.0, 15.4
LEVELS = ((13.0, 8.0), (10.9, 5.6))
"""Height and width of the divided levels."""
WHOLE = (8.5, 3.4)
"""Height and width of the level that is whole."""
LANES = (3.9, 1.3)
"""Heights of the two devices below."""
BOX, STEP = (1.9, 0.8), 2.83


def draw() -> Figure:
    """Return the picture: a U-Net in slabs, and the messages of a normalisation."""
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-0.4, 20.4)
    axes.set_ylim(-0.3, 14.9)
    _network(axes)
    _messages(axes)
    return figure


def _network(axes: Axes) -> None:
    text = "The maps of a U-Net on three devices: a slab of each, and a plane of each neighbour"
    axes.text(10, 14.45, text, ha="center", fontsize=12, weight="bold")
    for level, (y, width) in enumerate(LEVELS):
        for middle in (ENCODER, DECODER):
            _slabs(axes, middle, y, width)
        skip = (ENCODER + width / 2 + 0.25, y), (DECODER - width / 2 - 0.25, y)
        _arrow(axes, *skip, "skips stay\nwhere they are" if level == 0 else "")
        axes.text(-0.3, y, f"level {level}", ha="left", va="center", fontsize=10, rotation=90)
    (top, _), (low, width) = LEVELS
    for index in range(len(DEVICES)):
        shift = (index - 1) * width / len(DEVICES)
        down, up = ENCODER + shift, DECODER + shift
        _arrow(axes, (down, top - MAP_HEIGHT / 2), (down, low + MAP_HEIGHT / 2))
        _arrow(axes, (up, low + MAP_HEIGHT / 2), (up, top - MAP_HEIGHT / 2))
    y, width = WHOLE
    for index, colour in enumerate(DEVICES):
        bottom = y + (1 - index) * 0.62 - 0.25
        axes.add_patch(Rectangle((MIDDLE - width / 2, bottom), width, 0.5, color=colour))
        text = f"whole on device {index}"
        axes.text(MIDDLE, bottom + 0.25, text, ha="center", va="center", color="white", fontsize=9)
    axes.text(-0.3, y, "level 2", ha="left", va="center", fontsize=10, rotation=90)
    beside = width / 2 + 0.1
    corner = low - MAP_HEIGHT / 2
    _turn(axes, (ENCODER, corner), (ENCODER, y), (MIDDLE - beside, y))
    axes.text(ENCODER + 0.2, y - 0.12, "gather the slabs", ha="left", va="top", fontsize=10)
    _turn(axes, (MIDDLE + beside, y), (DECODER, y), (DECODER, corner))
    text = "upsample, take a slab"
    axes.text(DECODER - 0.2, y - 0.12, text, ha="right", va="top", fontsize=10)


def _slabs(axes: Axes, middle: float, y: float, width: float) -> None:
    """Draw a map in slabs, each with its halo in the colours of the neighbours."""
    number = len(DEVICES)
    own = (width - 2 * number * HALO - (number - 1) * GAP) / number
    left, bottom = middle - width / 2, y - MAP_HEIGHT / 2
    for index, colour in enumerate(DEVICES):
        axes.add_patch(Rectangle((left + HALO, bottom), own, MAP_HEIGHT, color=colour, linewidth=0))
        text = f"slab {index}"
        place = left + HALO + own / 2, y
        axes.text(*place, text, ha="center", va="center", color="white", fontsize=9)
        for at, neighbour in ((left, index - 1), (left + HALO + own, index + 1)):
            halo = Rectangle((at, bottom), HALO, MAP_HEIGHT, facecolor="white")
            if 0 <= neighbour < number:
                halo.set(facecolor=DEVICES[neighbour], alpha=0.55)
            else:  # zeros
                halo.set(edgecolor=ZEROS, linewidth=0.8)
            axes.add_patch(halo)
        left += own + 2 * HALO + GAP


def _messages(axes: Axes) -> None:
    text = "The four messages of a normalisation, between two neighbours"
    axes.text(10, 5.6, text, ha="center", fontsize=12, weight="bold")
    ends = "gradient of\nthe result", "sums", "gradient of\nthe input"
    work = ("convolution", "moments", "normalise", "convolution", *ends)
    for lane, colour in zip(LANES, DEVICES, strict=False):
        for number, name in enumerate(work):
            left = 0.5 + number * STEP
            box = FancyBboxPatch(
                (left, lane - BOX[1] / 2),
                *BOX,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=colour,
                edgecolor="none",
            )
            axes.add_patch(box)
            centre = left + BOX[0] / 2, lane
            axes.text(*centre, name, ha="center", va="center", fontsize=9, color="white")
            if number not in (3, 6):
                _arrow(axes, (left + BOX[0], lane), (left + STEP, lane))
    for lane, name in zip(LANES, ("device 0", "device 1"), strict=True):
        axes.text(-0.3, lane, name, ha="left", va="center", fontsize=10, rotation=90)
    said = {
        1: "1 gather\nnumber, mean,\nsquares",
        2: "2 exchange\nplanes of\nthe result",
        4: "3 exchange\ngradient of\nthe halo",
        5: "4 sum\ntwo sums of\neach channel",
    }
    for number, message in said.items():
        x = 0.5 + number * STEP + BOX[0] + (STEP - BOX[0]) / 2
        _arrow(axes, (x, LANES[1]), (x, LANES[0]), style="<|-|>")
        axes.text(
            x,
            sum(LANES) / 2,
            message,
            ha="center",
            va="center",
            fontsize=9.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
        )
    middle = 0.5 + 4 * STEP - (STEP - BOX[0]) / 2
    axes.plot([middle, middle], [0.6, 4.7], color=ZEROS, linewidth=1, linestyle=":")
    _below(axes, (0.5, middle - 0.3), "forward", "->")
    _below(axes, (middle + 0.3, 0.5 + 6 * STEP + BOX[0]), "backward", "->")


def _below(axes: Axes, ends: tuple[float, float], name: str, style: str) -> None:
    _arrow(axes, (ends[0], 0.3), (ends[1], 0.3), style=style)
    axes.text(sum(ends) / 2, 0.2, name, ha="center", va="top", fontsize=10)


def _turn(axes: Axes, *points: tuple[float, float]) -> None:
    """Draw an arrow around a corner."""
    start, corner, end = points
    axes.plot(*zip(start, corner, strict=True), color=LINE, linewidth=2, solid_capstyle="butt")
    _arrow(axes, corner, end)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    style: str = "-|>",
) -> None:
    look = {"arrowstyle": style, "color": LINE, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)
    if text:
        middle = (start[0] + end[0]) / 2, start[1] + 0.15
        axes.text(*middle, text, ha="center", va="bottom", fontsize=10)


if __name__ == "__main__":
    rcParams["svg.hashsalt"] = "unet3d"  # the same file from the same drawing
    picture = Path(__file__).with_name("slabs.svg")
    draw().savefig(picture, metadata={"Date": None}, facecolor="white")
