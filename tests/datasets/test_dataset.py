import unicodedata

import numpy as np
import pytest

from tests.images import samples
from tests.images.samples import blob_label, msd_entry, write_json, write_msd, write_volume
from unet3d.datasets.dataset import fold_cases, load_dataset
from unet3d.datasets.labels import Region
from unet3d.errors import DatasetError
from unet3d.preparation.check import examine


def test_reads_the_decathlon_layout(tmp_path):
    root = write_msd(tmp_path / "Task00", test=["./imagesTs/other.nii.gz"])
    dataset = load_dataset(root)
    assert load_dataset(root / "dataset.json") == dataset
    assert (dataset.root, dataset.channel_names) == (root, ("MRI",))
    assert dataset.label_names == ("background", "left", "right")
    assert dataset.label_values == (0, 1, 2)
    assert [case.name for case in dataset.cases] == ["case_0", "case_1", "case_2"]
    assert dataset.cases[1].images == (root / "imagesTr/case_1.nii.gz",)
    assert dataset.cases[1].label == root / "labelsTr/case_1.nii.gz"
    # Channels keep their order beyond ten.
    names = {str(number): f"m{number}" for number in reversed(range(12))}
    dataset = load_dataset(write_msd(tmp_path / "Task00", channel_names=names))
    assert dataset.channel_names == tuple(f"m{number}" for number in range(12))


def nnunet(root, **changes):
    samples.write_nnunet(root, ("liver_2", "liver_10"), **changes)
    (root / "labelsTr/._liver_2.nii.gz").write_bytes(b"left by a Mac")
    return root


def test_reads_nnunet_raw_with_several_channels(tmp_path):
    dataset = load_dataset(nnunet(tmp_path / "Dataset001_Liver"))
    assert dataset.channel_names == ("CT", "PET")
    assert dataset.label_names == ("background", "liver", "tumour")
    assert dataset.label_values == (0, 1, 2)
    assert [case.name for case in dataset.cases] == ["liver_10", "liver_2"]
    images = ["imagesTr/liver_2_0000.nii.gz", "imagesTr/liver_2_0001.nii.gz"]
    assert dataset.cases[1].images == tuple(dataset.root / image for image in images)
    entry = {"images": images, "label": "labelsTr/liver_2.nii.gz"}
    dataset = load_dataset(nnunet(tmp_path / "listed", dataset={"mine": entry}))
    (case,) = dataset.cases
    assert (case.name, len(case.images)) == ("mine", 2)


def test_reads_a_monai_datalist(tmp_path):
    entries = []
    for patient in ("a", "b", "c"):
        images = [f"{patient}/t1.nii.gz", f"{patient}/flair.nii.gz"]
        entries.append({"image": images, "label": f"{patient}/seg.nii.gz"})
        for name in images:
            write_volume(tmp_path / name, np.ones((4, 4, 4)))
        write_volume(tmp_path / patient / "seg.nii.gz", (blob_label((4, 4, 4)) > 0) * np.uint8(3))
    tree = {"training": entries[:2], "validation": entries[2:]}
    dataset = load_dataset(write_json(tmp_path / "list.json", tree))
    assert dataset.channel_names == ("channel 0", "channel 1")
    # dataset.json names no labels: they come from the label maps.
    assert dataset.label_values == (0, 3)
    assert dataset.label_names == ("background", "label 3")
    train, validation = fold_cases(dataset, 0, 5, seed=0)
    assert [case.name for case in train] == ["a/seg", "b/seg"]
    assert [case.name for case in validation] == ["c/seg"]
    with pytest.raises(DatasetError, match="only fold 0, not fold 1"):
        fold_cases(dataset, 1, 5, seed=0)


def test_regions_are_read_as_nnunet_writes_them(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 4], "core": [2, 4], "enhancing": 4, "ignore": 5}
    dataset = load_dataset(nnunet(tmp_path, labels=labels, regions_class_order=[1, 2, 4]))
    assert dataset.label_values == (0, 1, 2, 4)
    assert dataset.label_names == ("background", "label 1", "label 2", "enhancing")
    assert dataset.ignore_value == 5
    assert dataset.regions == (
        Region(name="whole", values=(1, 2, 4), written=1),
        Region(name="core", values=(2, 4), written=2),
        Region(name="enhancing", values=(4,), written=4),
    )


def test_labels_may_be_called_by_numbers(tmp_path):
    """nnU-Net has numbers as names of values without names; the Decathlon's names are texts."""
    dataset = load_dataset(nnunet(tmp_path, labels={"0": 0, "1": 1, "2": 3}))
    assert (dataset.label_names, dataset.label_values) == (("0", "1", "2"), (0, 1, 3))
    regions = {"0": 0, "1": [1, 2], "2": 2}
    dataset = load_dataset(nnunet(tmp_path, labels=regions, regions_class_order=[1, 2]))
    assert [region.name for region in dataset.regions] == ["1", "2"]


@pytest.mark.parametrize(
    ("labels", "values", "ignored"),
    [
        ({"b": 2**32 - 1, "a": 614454277}, (0, 614454277, 2**32 - 1), None),
        ({"0": "background", "1": "a", "4": "b", "7": "ignore"}, (0, 1, 4), 7),
    ],
)
def test_labels_are_sorted_by_value_and_ignored_voxels_are_of_no_class(
    tmp_path, labels, values, ignored
):
    dataset = load_dataset(nnunet(tmp_path, labels=labels))
    assert (dataset.label_values, dataset.label_names) == (values, ("background", "a", "b"))
    assert dataset.ignore_value == ignored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": {"a": [1, 2]}}, "order is None; name the value that is written for each of"),
        ({"labels": {"a": [1, 2]}, "regions_class_order": [1, 2]}, "2.; name .* the 1 regions"),
        ({"labels": {"a": [0, 2]}, "regions_class_order": [2]}, "a is .0, 2.; a region is made of"),
        (
            {"labels": {"a": [1, 2], "b": [2, 1]}, "regions_class_order": [1, 2]},
            "same values, 1, 2; l",
        ),
        ({"labels": {"a": [1, "x"]}, "regions_class_order": [1]}, "a has the value 'x'; use whole"),
        ({"labels": {"a": 1, "ignore": [5, 6]}}, "is 5, 6, and the highest other value is 1"),
        ({"labels": {"a": 3, "ignore": 2}}, "value is 3; give ignore one value above"),
        ({"labels": {"0": "background", "1": "ignore"}}, "only the background"),
        ({"labels": ["background", "a"]}, "names and values"),
        ({"channel_names": {"0": "CT", "2": "PET"}}, "numbered 0, 2"),
        ({"labels": {"background": 0, "a": 2**32}}, "4294967296; use whole numbers from 0 to"),
        ({"labels": {"background": 0, "a": "9" * 5000}}, r"value '9+\.\.\.9+'; use whole"),
        ({"labels": {"background": 1, "a": 2}}, "two labels are called background, one by default"),
        ({"labels": {"1": "e\u0301", "2": "\u00e9"}}, "are both called \u00e9"),
        ({"labels": {"1": 5.0}}, "label 1 is called 5.0"),
        ({"labels": {"a": 0, "b": 0, "c": 1}}, "a and b have the same values, 0"),
        ({"labels": {"1": "a\n\x1b[31m"}}, r"label 1 is called 'a\\n\\x1b\[31m'"),
        ({"labels": {"1": "x" * 10**6}}, r"label 1 is called 'x{10,40}\.\.\.x{10,40}'; a name is"),
        ({"labels": {f"l{n}": n for n in range(66000)}}, "names 66000 labels; use at most"),
        ({"file_ending": ".png"}, "file_ending is '.png'; known: .nii.gz"),
        ({"file_ending": ".nrrd"}, "labelsTr holds no file that ends in .nrrd; correct file_end"),
        ({"dataset": {"": {}}}, "a case is called ''"),
        ({"dataset": {"../a": {}}}, r"the case name \.\./a leads out of its folder"),
        ({"dataset": {"a": 3}}, "dataset.a needs an image and a label"),
    ],
)
def test_refuses_what_it_cannot_train_on(tmp_path, changes, message):
    with pytest.raises(DatasetError, match=message) as caught:
        load_dataset(nnunet(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


NO_NAMES = ["a\0.nii", "a\n.nii", "\udcff.nii", ".", "a/..", ["a.nii"], {"a": 1}, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": [{"label": "a.nii.gz"}]}, r"training\[0\] needs an image and a label"),
        ({"training": [{"image": "a.nii.gz"}]}, "no labelled case"),
        ({"training": ["a.nii.gz"]}, r"training\[0\] needs an image and a label, but is .a"),
        ({"validation": {"image": "a"}}, r"validation is {'image': 'a'}; it needs a list"),
        ({"training": [msd_entry(0)] * 2}, "would both be the case case_0"),
        *(({"training": [msd_entry(0, label=n)]}, r"training\[0\] names") for n in NO_NAMES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_lists_that_it_cannot_follow(tmp_path, changes, message):
    root = write_msd(tmp_path, 2, **changes)
    with pytest.raises(DatasetError, match=message) as caught:
        load_dataset(root)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_links_are_followed_wherever_they_lead(tmp_path):
    store = nnunet(tmp_path / "store")
    (root := tmp_path / "raw").mkdir()
    (root / "dataset.json").symlink_to(store / "dataset.json")
    (root / "labelsTr").symlink_to(store / "labelsTr")
    (root / "imagesTr").mkdir()
    for image in (store / "imagesTr").iterdir():
        (root / "imagesTr" / image.name).symlink_to(image)
    (root / "imagesTr/liver_2_0001.nii.gz").rename(root / "imagesTr/liver_2_0001.NII.GZ")
    (tmp_path / "linked").symlink_to(root)
    for path in (root, tmp_path / "linked"):
        dataset = load_dataset(path)
        assert [case.name for case in dataset.cases] == ["liver_10", "liver_2"]
        assert dataset.cases[1].images[1].name == "liver_2_0001.NII.GZ"
        assert examine(dataset).findings == []


def test_a_datalist_may_name_files_anywhere(tmp_path):
    store, root = write_msd(tmp_path / "store", 3), tmp_path / "lists"
    (tmp_path / "link").symlink_to(root)
    write_volume(root / "labelsTr/mine.nii.gz", blob_label((12, 14, 10)))
    images = [str(store / f"imagesTr/case_{number}.nii.gz") for number in range(4)]
    labels = [
        str(store / "labelsTr/case_0.nii.gz"),
        "../store/labelsTr/case_1.nii.gz",
        str(tmp_path / "link/labelsTr/mine.nii.gz"),
    ]
    entries = [{"image": i, "label": one} for i, one in zip(images, labels, strict=False)]
    tree = {"training": entries, "labels": {"0": "background", "1": "left", "2": "right"}}
    dataset = load_dataset(write_json(root / "list.json", tree))
    assert examine(dataset).findings == []
    outside = str(store).lstrip("/")
    names = [f"{outside}/labelsTr/case_0", f"{outside}/labelsTr/case_1", "mine"]
    assert [case.name for case in dataset.cases] == names  # results lie in a folder by these names
    tree["training"].append({"image": images[3], "label": str(tmp_path / "absent.nii.gz")})
    findings = examine(load_dataset(write_json(root / "list.json", tree))).findings
    image, label = (finding.message for finding in findings)
    assert image.startswith(f"{images[3]} is missing")
    assert f"has no label map: {tmp_path}/absent.nii.gz is missing" in label


def test_says_which_layouts_are_understood(tmp_path):
    with pytest.raises(DatasetError, match="there is no data set at"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"holds no dataset.json.*Decathlon.*nnU-Net"):
        load_dataset(tmp_path)
    for content, said in (
        (b"[1, 2]", r"no known layout.*Decathlon.*nnU-Net"),
        (b'{"training": [],}', "not valid JSON: .*line 1 .*; correct it, often a comma$"),
        (b"\xff\xfe\x00", "not text in UTF-8; correct it$"),
    ):
        (tmp_path / "dataset.json").write_bytes(content)
        with pytest.raises(DatasetError, match=said):
            load_dataset(tmp_path)


def test_drawn_folds_validate_every_case_once(tmp_path, caplog):
    dataset = load_dataset(write_msd(tmp_path, num_cases=13))
    validated = []
    for fold in range(5):
        train, validation = fold_cases(dataset, fold, 5, seed=3)
        assert {*train, *validation} == {*dataset.cases} and len(train) + len(validation) == 13
        assert len(validation) in (2, 3)
        validated += validation
    assert len(validated) == 13 and {*validated} == {*dataset.cases}
    assert fold_cases(dataset, 0, 5, seed=3) == fold_cases(dataset, 0, 5, seed=3)
    assert fold_cases(dataset, 0, 5, seed=3) != fold_cases(dataset, 0, 5, seed=4)
    with pytest.raises(DatasetError, match="folds 0 to 4, not fold 5"):
        fold_cases(dataset, 5, 5, seed=3)
    # Few cases give fewer folds.
    dataset = load_dataset(write_msd(tmp_path, num_cases=3))
    train, validation = fold_cases(dataset, 2, 5, seed=0)
    assert (len(train), len(validation)) == (2, 1)
    assert "only 3 cases, so 3 folds instead of 5" in caplog.text
    lonely = load_dataset(write_msd(tmp_path, num_cases=1))
    with pytest.raises(DatasetError, match="it needs two, one to"):
        fold_cases(lonely, 0, 5, seed=0)
    for every in (dataset, lonely):
        assert fold_cases(every, "none", 5, seed=0) == (every.cases, ())


def test_honours_splits_final(tmp_path, caplog):
    root = write_msd(tmp_path)
    given = root / "splits_final.json"
    fold = {"train": ["case_0", "case_2"], "val": ["case_1"]}
    write_json(given, [{"train": ["case_2"], "val": ["case_0"]}, fold])
    train, validation = fold_cases(load_dataset(root), 1, 5, seed=0)
    assert [case.name for case in train] == ["case_0", "case_2"]
    assert [case.name for case in validation] == ["case_1"]
    assert caplog.records == []
    fold_cases(load_dataset(root), 0, 5, seed=0)
    assert "fold 0 uses 1 of 3 cases neither for training nor for validation" in caplog.text


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        (None, r"cannot read .*splits_final.json: No such file"),
        ({"train": []}, "list of folds"),
        ([{"train": ["case_0"]}], "'val'"),
        ([{"train": ["case_0"], "val": ["case_9"]}], "case_9, which is not a case"),
        ([{"train": ["case_0", "case_1"], "val": ["case_1"]}], "case_1 twice"),
        ([{"train": ["case_0"], "val": ["x" * 10**6]}], r"names x{80}\.\.\., which is not a case"),
    ],
)
def test_a_wrong_split_hides_no_other_fault(tmp_path, folds, message):
    root = write_msd(tmp_path)
    given = root / "splits_final.json"
    if folds is None:
        given.symlink_to("not fetched yet")
    else:
        write_json(given, folds)
    assert_has_bad_folds(root, message)


def assert_has_bad_folds(root, message):
    (root / "imagesTr/case_1.nii.gz").unlink()
    dataset = load_dataset(root)
    with pytest.raises(DatasetError, match=message) as caught:
        fold_cases(dataset, 0, 5, seed=0)
    split, missing = examine(dataset).findings
    assert split.severity == "error" and str(caught.value).endswith(f": {split.message}")
    assert "case_1.nii.gz is missing" in missing.message


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        ((0, None), "the folds are 0, None; give each case one of 0, 1"),
        ((0, 7), "0, 7"),
        ((0, "1"), "the folds are '1', 0; give"),
        ((0, 0), "the folds are 0; give each case one of 0, 1, ... and use at least two"),
    ],
)
def test_wrong_fold_keys_hide_no_other_fault(tmp_path, folds, message):
    entries = [msd_entry(number, fold=fold) for number, fold in enumerate(folds)]
    assert_has_bad_folds(write_msd(tmp_path, 2, training=entries), message)


def test_every_image_without_label_map_is_named(tmp_path, caplog):
    root = nnunet(tmp_path / "nnunet")
    for name in ("a_0000", "b_0000", "b_0001", "c_0002", "whole"):
        write_volume(root / f"imagesTr/{name}.nii.gz", np.ones((4, 4, 4)))
    fold = {"train": ["a", "liver_10"], "val": ["b"]}
    write_json(root / "splits_final.json", [fold, {"train": ["z"], "val": ["a"]}])
    split, *findings = examine(load_dataset(root)).findings
    assert "fold 1 names z, which is not a case" in split.message
    add = "is missing; add it, or take the case out of the data set"
    assert [f"{finding.severity}: {finding.message}" for finding in findings] == [
        f"error: {root}/imagesTr/a_0001.nii.gz {add}",
        f"error: has no label map: {root}/labelsTr/a.nii.gz {add}",
        f"error: has no label map: {root}/labelsTr/b.nii.gz {add}",
        f"warning: {root}/imagesTr/c_0002.nii.gz belongs to no case and is not used",
        f"warning: {root}/imagesTr/whole.nii.gz belongs to no case and is not used",
    ]
    long = msd_entry(0, image="x" * 300)  # longer than a file name can be
    lists = {"training": [long, msd_entry(1, label=None), {"image": "x/y.nii"}]}
    root = write_msd(tmp_path / "msd", labels=None, **lists, validation=[msd_entry(2)])
    (root / "labelsTr/case_2.nii.gz").unlink()  # so its labels cannot be found
    dataset = load_dataset(root)
    assert [case.name for case in dataset.cases] == ["case_0", "case_2"]
    said = [f"{one.case} {one.message}".partition(":")[0] for one in examine(dataset).findings]
    assert said[:2] == [f"{name} has no label map" for name in ("case_1", "y")]
    assert f"{'x' * 300} is missing; add it" in said[2] and said[3] == "case_2 has no label map"


def test_honours_fold_keys(tmp_path, caplog):
    entries = [msd_entry(number, fold=number % 2) for number in range(4)]
    root = write_msd(tmp_path, 4, training=entries)
    train, validation = fold_cases(load_dataset(root), 1, 5, seed=0)
    assert [case.name for case in train] == ["case_0", "case_2"]
    assert [case.name for case in validation] == ["case_1", "case_3"]
    # Cases set aside for validation are in no fold.
    root = write_msd(tmp_path, 4, training=entries[:3], validation=entries[3:])
    train, validation = fold_cases(load_dataset(root), 0, 5, seed=0)
    assert [case.name for case in (*train, *validation)] == ["case_1", "case_0", "case_2"]
    assert "fold 0 uses 1 of 4 cases neither for training nor for validation" in caplog.text


def test_the_case_of_letters_in_an_ending_leaves_no_file_out(tmp_path):
    root = nnunet(tmp_path)
    (root / "labelsTr/liver_2.nii.gz").rename(root / "labelsTr/liver_2.NII.GZ")
    (root / "imagesTr/liver_2_0001.nii.gz").rename(root / "imagesTr/liver_2_0001.Nii.gz")
    dataset = load_dataset(root)
    assert [case.name for case in dataset.cases] == ["liver_10", "liver_2"]
    assert dataset.cases[1].images[1].name == "liver_2_0001.Nii.gz"
    assert dataset.cases[1].label.name == "liver_2.NII.GZ"
    assert examine(dataset).findings == []


def test_cases_of_one_name_are_refused_but_an_image_may_have_two_label_maps(tmp_path):
    entries = [msd_entry(0), msd_entry(1, label="labelsTr/case_0.nii")]
    root = write_msd(tmp_path, training=entries)
    write_volume(root / "labelsTr/case_0.nii", blob_label((12, 14, 10)))
    with pytest.raises(DatasetError, match=r"case_0.nii.gz and .*case_0.nii would both be the"):
        load_dataset(root)
    entries[1] = msd_entry(0, label="labelsTr/case_1.nii.gz")  # such as a second person's label map
    dataset = load_dataset(write_msd(tmp_path, 2, training=entries))
    assert [case.name for case in dataset.cases] == ["case_0", "case_1"]
    assert dataset.cases[0].images == dataset.cases[1].images


def test_the_name_of_a_case_depends_on_no_other_case(tmp_path):
    labels = ["labelsTr/seg.nii.gz", "a/b_c/seg.nii.gz", "a_b/c/seg.nii.gz"]
    entries = [msd_entry(number, label=label) for number, label in enumerate(labels)]
    names = ["seg", "a/b_c/seg", "a_b/c/seg"]
    for number in (1, 2, 3):
        dataset = load_dataset(write_msd(tmp_path, training=entries[:number]))
        assert [case.name for case in dataset.cases] == names[:number]
    dataset = load_dataset(write_msd(tmp_path, training=entries[:2], validation=entries[2:]))
    assert [case.name for case in dataset.cases] == names
    assert dataset.validation == ("a_b/c/seg",)


def test_names_agree_whatever_the_form_of_their_letters(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))
    entries = [msd_entry(0, label=f"labelsTr/{decomposed}.nii.gz"), msd_entry(1)]
    root = write_msd(tmp_path, training=entries)
    for name in (composed, decomposed):
        write_json(root / "splits_final.json", [{"train": ["case_1"], "val": [name]}])
        _, validation = fold_cases(load_dataset(root), 0, 5, seed=0)
        assert [case.name for case in validation] == [composed]
    entries[1]["label"] = f"labelsTr/{composed}.nii.gz"
    write_msd(tmp_path, training=entries)
    with pytest.raises(DatasetError, match=f"would both be the case {composed}; rename"):
        load_dataset(root)


def test_what_is_not_named_is_found_in_the_volumes(tmp_path):
    images = ["imagesTr/case_0.nii.gz", "imagesTr/two.nii.gz"]
    root = write_msd(tmp_path, 1, modality=None, training=[msd_entry(0, image=images)])
    write_volume(root / "imagesTr/two.nii.gz", np.ones((12, 14, 10, 2), np.float32))
    dataset = load_dataset(root)
    assert dataset.channel_names == ("channel 0", "channel 1", "channel 2")
    assert examine(dataset).findings == []
    # An image is not searched for labels.
    root = write_msd(tmp_path, labels=None, shape=(70, 40, 30))
    grey = np.arange(70 * 40 * 30, dtype=np.float32).reshape(70, 40, 30)
    write_volume(root / "labelsTr/case_1.nii.gz", grey)
    with pytest.raises(DatasetError, match=r"case_1.nii.gz holds 84000 values; is it an image"):
        load_dataset(root)


def test_volumes_on_servers_are_refused(tmp_path):
    root = write_msd(tmp_path, training=[msd_entry(0, image="https://host/scan.ome.zarr")])
    with pytest.raises(DatasetError, match="names 'https://host/scan.ome.zarr' on a server; copy"):
        load_dataset(root)
