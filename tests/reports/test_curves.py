import math

from tests.reports.records import assert_is_picture, curves, legend
from unet3d.reports.curves import progress_figure
from unet3d.reports.figures import write_figure


def metrics_of(num_epochs, labels):
    made = []
    for epoch in range(1, num_epochs + 1):
        rate = 0.01 * (1 - epoch / num_epochs) ** 0.9
        line = {"epoch": epoch, "loss": math.exp(-epoch / 5), "learning_rate": rate}
        if epoch % 2 == 0:
            line |= {"dice": {label: 1 - 1 / epoch for label in labels}, "mean_dice": 1 - 1 / epoch}
            line["validation_loss"] = 1.5
        made.append(line)
    return made


def test_each_curve_shows_its_numbers():
    metrics = metrics_of(6, ["brain", "lesion"])
    loss, dice, rate = progress_figure(metrics, "run").axes
    epochs = [1, 2, 3, 4, 5, 6]
    assert curves(loss) == {
        "training  0.301": (epochs, [line["loss"] for line in metrics]),
        "validation  1.500": ([2, 4, 6], [1.5, 1.5, 1.5]),
    }
    assert legend(loss) == list(curves(loss))
    assert list(curves(rate).values()) == [(epochs, [line["learning_rate"] for line in metrics])]
    values = ([2, 4, 6], [1 - 1 / 2, 1 - 1 / 4, 1 - 1 / 6])
    best = {"best  0.833\nin epoch 6": ([6], [1 - 1 / 6])}
    assert curves(dice) == {f"{one}  0.833": values for one in ("brain", "lesion", "mean")} | best
    assert legend(dice) == list(curves(dice))
    labels = [axes.get_ylabel() for axes in (loss, dice, rate)]
    assert labels == ["loss", "Dice in validation", "learning rate"]
    assert rate.get_xlabel() == "epoch"


def test_a_single_epoch_is_a_point_and_many_labels_are_not_named():
    loss, dice, _ = progress_figure(metrics_of(1, ["a"]), "run").axes
    assert [line.get_marker() for line in loss.get_lines()] == ["o"]
    assert [text.get_text() for text in dice.texts] == ["no validation"]
    dice = progress_figure(metrics_of(10, [f"region {n}" for n in range(116)]), "run").axes[1]
    assert legend(dice) == ["mean of 116 labels  0.900", "best  0.900\nin epoch 10"]
    assert len(dice.get_lines()) == 118


def test_the_first_of_the_best_validations_is_marked():
    metrics = metrics_of(10, ["a"])
    for line, mean in zip(metrics[1::2], (0.5, 0.75, None, 0.75, 0.25), strict=True):
        line["mean_dice"] = mean
    figure = progress_figure(metrics, "runs/mine: fold 0 of heads")
    assert curves(figure.axes[1])["best  0.750\nin epoch 4"] == ([4], [0.75])
    assert figure.get_suptitle() == "runs/mine: fold 0 of heads"


def test_a_picture_replaces_the_last_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "progress.png"
    path.write_bytes(b"the picture of the epoch before")
    for names in (["$\\frac", "under_score"], ["肝臟"]):
        write_figure(progress_figure(metrics_of(4, names), names[0]), path)
        assert_is_picture(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_line_lacks_leaves_a_gap():
    metrics = [{"epoch": 1}, *metrics_of(4, ["a"])[1:3], {"epoch": 4, "loss": None, "dice": {}}]
    loss, dice, rate = progress_figure(metrics, "run").axes
    drawn = curves(loss)["training  –"][1]
    assert [math.isnan(value) for value in drawn] == [True, False, False, True]
    assert curves(dice)["a  0.500"] == ([2], [0.5])
    assert math.isnan(rate.get_lines()[0].get_ydata()[0])
