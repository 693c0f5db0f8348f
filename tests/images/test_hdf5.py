"""HDF5 files as h5py writes them, and damaged ones; the references are the arrays written."""

import json
import multiprocessing
import resource
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line import run
from tests.images.samples import read_image, read_or_refuse, refusal, write_json
from tests.mutations import damaged, property_test
from tests.networks import write_checkpoint
from unet3d.datasets.dataset import load_dataset
from unet3d.errors import VolumeError
from unet3d.images.files import file_and_dataset, volume_stem, volume_suffix, written_suffix
from unet3d.images.image import open_image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Reading
from unet3d.inference.evaluation import evaluate
from unet3d.preparation.cache import Cache
from unet3d.preparation.check import examine

h5py = pytest.importorskip("h5py")

RNG = np.random.default_rng(0)
ARRAY = RNG.integers(0, 255, (7, 40, 50), np.uint8)  # Z, Y, X
CHANNELS = RNG.integers(0, 60000, (2, 7, 40, 50)).astype(np.uint16)


def written(path, array=ARRAY, name="raw", attributes=None, **options):
    """Add a dataset to a file."""
    with h5py.File(path, "a") as file:
        if name in file:
            del file[name]
        dataset = file.create_dataset(name, data=array, **options)
        dataset.attrs.update(attributes or {})
    return path


def ours(array):
    """Return an array (Z, Y, X) as (C, X, Y, Z)."""
    return array.T[None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (3, 16, 16)},
        {"chunks": (7, 40, 50), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (3, 16, 16), "compression": "lzf"},
        {"chunks": (2, 40, 50), "compression": "gzip", "compression_opts": 9},
    ],
    ids=str,
)
def test_every_layout_is_read_whole_and_in_boxes(tmp_path, options):
    for dtype in ("u1", ">i2", "<u4", "f8", "f2"):
        path = written(tmp_path / "scan.h5", ARRAY.astype(dtype), **options)
        image = open_image(path)
        expected = ours(ARRAY.astype(dtype).astype(np.float32))
        assert image.dtype == np.dtype(dtype).newbyteorder("=") and not image.geometry.is_anatomical
        np.testing.assert_array_equal(image.whole(), expected)
        for box in (np.s_[0:50, 0:40, 3:4], np.s_[3:9, 5:33, 2:5], np.s_[1:50, 9:9, 0:7]):
            np.testing.assert_array_equal(image.read(box), expected[:, *box])
        assert image.unpacked_bytes == 0


def test_truth_values_are_labels(tmp_path):
    path = written(tmp_path / "scan.hdf5", ARRAY > 100)
    np.testing.assert_array_equal(read_label(path).array, ours(ARRAY)[0] > 100)


def test_axes_follow_tags_labels_and_sizes(tmp_path):
    path = tmp_path / "scan.h5"
    expected = CHANNELS.transpose(0, 3, 2, 1)
    np.testing.assert_array_equal(read_image(written(path, CHANNELS)), expected)
    last = np.moveaxis(CHANNELS, 0, 3)
    np.testing.assert_array_equal(read_image(written(path, last)), expected)
    middle = np.moveaxis(CHANNELS, 0, 1)
    assert "4 axes (7x2x40x50) without names; a volume needs z, y and x" in refusal(
        written(path, middle)
    )
    np.testing.assert_array_equal(open_image(path, reading=Reading(axes="zcyx")).whole(), expected)
    labels = written(tmp_path / "labels.h5")
    image = open_image(labels, reading=Reading(axes="zcyx"))
    np.testing.assert_array_equal(image.whole(), ours(ARRAY))
    tags = {"axistags": json.dumps({"axes": [{"key": key} for key in "zcyx"]})}
    np.testing.assert_array_equal(read_image(written(path, middle, attributes=tags)), expected)
    written(path, CHANNELS.transpose())
    with h5py.File(path, "a") as file:
        for dimension, name in zip(file["raw"].dims, "xyzc", strict=True):
            dimension.label = name
    np.testing.assert_array_equal(read_image(path), expected)

    def read_as(axes):
        return refusal(path, lambda path: open_image(path, reading=Reading(axes=axes)))

    assert "4 axes (50x40x7x2) named z,y,x; a volume needs z, y and x" in read_as("zyx")
    assert "named z,y,x,x; a volume needs z, y and x, each once" in read_as("zyxx")
    assert "2 positions along its axis q; if they are points in time" in read_as("xyzq")


def test_one_point_in_time_is_read(tmp_path):
    path = written(tmp_path / "film.h5", CHANNELS)
    for options in ({}, {"chunks": (1, 7, 16, 16)}):
        written(path, CHANNELS, **options)
        for time in range(2):
            image = open_image(path, reading=Reading(axes="tzyx", time=time))
            np.testing.assert_array_equal(image.whole(), ours(CHANNELS[time]))

    def read(time):
        return refusal(path, lambda path: open_image(path, reading=Reading(axes="tzyx", time=time)))

    assert "has 2 points in time; choose one with --time, 0 to 1" in read(None)
    assert "has no point in time 2; --time may be 0 to 1" in read(2)
    for label in (CHANNELS[0], CHANNELS[:1]):  # has fewer axes than stated, or only this point
        written(path, label)
        for axes in ("tczyx", "tzyx"):
            found = open_image(path, reading=Reading(axes=axes, time=1))
            np.testing.assert_array_equal(found.whole(), ours(CHANNELS[0]))


def test_spacing_and_position(tmp_path, caplog):
    path = tmp_path / "scan.h5"
    micrometres = {"element_size_um": [0.25, 0.125, 0.1]}
    geometry = open_image(written(path, attributes=micrometres)).geometry
    assert geometry.spacing_mm == (1e-4, 1.25e-4, 2.5e-4) and geometry.unit == "micrometer"
    nanometres = {"resolution": np.array([40, 4, 4]), "offset": (80.0, 8, 12)}
    geometry = open_image(written(path, attributes=nanometres)).geometry
    assert geometry.spacing_mm == (4e-6, 4e-6, 4e-5) and geometry.unit == "nanometer"
    np.testing.assert_allclose(geometry.affine[:3, 3], (1.2e-5, 8e-6, 8e-5))
    of_channels = {"element_size_um": [1, 3, 2, 1]}
    geometry = open_image(written(path, CHANNELS, attributes=of_channels)).geometry
    assert geometry.spacing_mm == (0.001, 0.002, 0.003)
    stated = open_image(path, reading=Reading(spacing_mm=(1, 2, 3))).geometry
    assert stated.spacing_mm == (1, 2, 3) and stated.has_spacing
    assert not caplog.records
    for bad in (0, "text", [1, 2], [0.1, -1, 0.1], [np.nan] * 3):
        geometry = open_image(written(path, attributes={"element_size_um": bad})).geometry
        assert not geometry.has_spacing
    assert "state it with --spacing" in caplog.text


def test_a_file_with_several_volumes_asks_for_one(tmp_path):
    path = written(tmp_path / "scan.h5", ARRAY, "raw")
    written(path, ARRAY % 3, "labels/cells")
    written(path, np.arange(3), "table")
    message = refusal(path)
    assert "holds several volumes; name one of labels/cells (7x40x50 uint8), raw (7" in message
    assert f"such as {path}:/raw" in message
    for name, expected in (("raw", ARRAY), ("labels/cells", ARRAY % 3)):
        for text in (f"{path}:/{name}", f"{path}/{name}", f"{path}:{name}"):
            named = type(path)(text)
            assert file_and_dataset(named) == (path, name) and volume_stem(named) == "scan"
            assert written_suffix(named) == ".h5" == volume_suffix(named)
            np.testing.assert_array_equal(read_image(named), ours(expected))
    for wrong in ("no", "labels", "raw/inside", "table", "labels/../raw"):
        assert "names no volume of its file" in refusal(type(path)(f"{path}:/{wrong}"))
    with pytest.raises(VolumeError, match="missing.h5: No such file or directory"):
        open_image(tmp_path / "missing.h5:" / "raw")


def test_nothing_is_read_from_other_files(tmp_path):
    path = tmp_path / "scan.h5"
    other = written(tmp_path / "other.h5")
    with h5py.File(path, "w") as file:
        file["outside"] = h5py.ExternalLink(str(other), "/raw")
        file["soft"] = h5py.SoftLink("/outside")
        layout = h5py.VirtualLayout(ARRAY.shape, ARRAY.dtype)
        layout[...] = h5py.VirtualSource(str(other), "raw", ARRAY.shape)
        file.create_virtual_dataset("virtual", layout)
        (tmp_path / "bytes").write_bytes(ARRAY.tobytes())
        place = [(str(tmp_path / "bytes"), 0, ARRAY.nbytes)]
        file.create_dataset("external", ARRAY.shape, "u1", external=place)
    for name in ("outside", "soft"):
        assert "names no volume of its file" in refusal(type(path)(f"{path}:/{name}"))
    for name in ("virtual", "external"):
        assert "has its voxels in other files" in refusal(type(path)(f"{path}:/{name}"))


def test_files_that_are_no_volume_are_refused(tmp_path):
    path = tmp_path / "scan.h5"
    path.write_bytes(b"no HDF5 file")
    assert "file signature not found" in refusal(path)
    path.write_bytes(b"")
    assert "is empty" in refusal(path)
    path.unlink()
    assert "No such file or directory" in refusal(path)
    written(path, np.zeros((3, 4)), "flat")
    assert "holds no dataset with three axes; name a volume" in refusal(path)
    written(path, np.zeros((3, 4, 5), complex))
    assert "holds complex voxels" in refusal(type(path)(f"{path}:/raw"))


def test_missing_chunks_are_mentioned_once(tmp_path, caplog):
    path = tmp_path / "scan.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("raw", ARRAY.shape, "u1", chunks=(3, 20, 25), fillvalue=9)
        dataset[:3] = ARRAY[:3]
    for _ in range(2):
        np.testing.assert_array_equal(read_image(path)[..., :3], ours(ARRAY[:3]))
        assert (read_image(path)[..., 3:] == 9).all()
    assert caplog.text.count("lacks 8 of 12 chunks; their voxels are 9, as HDF5 defines") == 1


def test_a_missing_filter_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "scan.h5", compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    assert "in a way that h5py lacks: pip install hdf5plugin" in refusal(path)


PACKED = {"chunks": (2, 4, 4), "compression": "gzip"}


@pytest.mark.parametrize("options", [{}, PACKED], ids=str)
def test_a_file_that_is_cut_off_is_refused_at_any_length(tmp_path, options):
    path = written(tmp_path / "scan.h5", **options)
    content = path.read_bytes()
    for size in range(1, len(content) - 1, 397):
        path.write_bytes(content[:size])
        message = refusal(path)
        assert "damaged or incomplete" in message


@pytest.mark.parametrize("options", [{}, PACKED], ids=str)
def test_damaged_files_are_read_or_refused(tmp_path, options):
    path = tmp_path / "scan.h5"
    content = written(path, ARRAY[:3, :6, :5], **options).read_bytes()

    @given(st.data())
    def check(data):
        path.write_bytes(data.draw(damaged(content)))
        read_or_refuse(path)

    property_test(check, share=0.5)()


def test_labels_are_written_with_the_place_of_their_scan(tmp_path):
    for attributes in (
        {"element_size_um": [0.25, 0.125, 0.1]},
        {"resolution": [40.0, 4, 4], "offset": [80.0, 8, 12]},
        {},
    ):
        scan = open_image(written(tmp_path / "scan.h5", attributes=attributes))
        for highest in (1, 300, 70000, 2**40):
            labels = (ours(ARRAY)[0] > 100) * np.uint64(highest)
            path = tmp_path / "scan_seg.h5"
            write_label(path, labels, scan.geometry, names={1: "wall", highest: "<µ>"})
            with h5py.File(path) as file:
                (dataset,) = file.values()
                assert dataset.name == "/segmentation" and dataset.compression == "gzip"
                assert dataset.dtype == np.min_scalar_type(highest)
                np.testing.assert_array_equal(dataset[...], labels.T)
                for name, value in attributes.items():
                    np.testing.assert_allclose(dataset.attrs[name], value, rtol=1e-12)
            label = read_label(path)
            np.testing.assert_array_equal(label.array, labels)
            np.testing.assert_allclose(label.geometry.affine, scan.geometry.affine, rtol=1e-9)
            assert label.geometry.has_spacing == bool(attributes)
            assert read_label_names(path) == {1: "wall"} | {highest: "<µ>"}
        assert {*tmp_path.iterdir()} == {scan.geometry.path, path}
    assert read_label_names(scan.geometry.path) == {}


def test_a_large_map_is_written_in_parts(tmp_path):
    labels = np.lib.format.open_memmap(tmp_path / "labels.npy", "w+", np.uint16, (130, 140, 70))
    labels[...] = RNG.integers(0, 500, labels.shape)
    scan = open_image(written(tmp_path / "scan.h5", labels.T))
    write_label(tmp_path / "seg.h5", labels, scan.geometry)
    np.testing.assert_array_equal(read_label(tmp_path / "seg.h5").array, labels)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    labels = RNG.integers(0, 255, (100, 90, 80), np.uint8)
    scan = open_image(written(tmp_path / "scan.h5", labels.T))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1000, 20_000, 300_000):  # as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(VolumeError, match=r"seg.h5: File too large; choose a folder"):
                write_label(tmp_path / "seg.h5", labels, scan.geometry)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {*tmp_path.iterdir()} == {scan.geometry.path}


SHARED = []


def _sum_of_shared(_):
    return float(SHARED[0].read(np.s_[3:30, 2:39, 1:6]).sum())


@pytest.mark.parametrize("options", [{}, {"chunks": (3, 16, 16), "compression": "gzip"}], ids=str)
def test_images_opened_before_a_fork_are_read_after_it(tmp_path, options):
    SHARED[:] = [open_image(written(tmp_path / "scan.h5", **options))]
    expected = _sum_of_shared(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_sum_of_shared, range(4)) == [expected] * 4
    assert _sum_of_shared(0) == expected


def test_data_sets_name_datasets_in_files(tmp_path):
    entries = []
    for number in range(2):
        path = written(tmp_path / f"cell_{number}.h5", ARRAY, "raw")
        written(path, (ARRAY > 100).astype(np.uint8), "label")
        entries.append({"image": f"{path.name}:/raw", "label": f"{path.name}:/label"})
    tree = {"labels": {"background": 0, "wall": 1}, "channel_names": ["EM"], "training": entries}
    write_json(tmp_path / "dataset.json", tree)
    dataset = load_dataset(tmp_path)
    assert [case.name for case in dataset.cases] == ["cell_0", "cell_1"]
    assert not [one for one in examine(dataset).findings if one.severity == "error"]
    cache, case = Cache(tmp_path / "cache"), dataset.cases[0]
    assert cache.digest(case.images[0]) != cache.digest(case.label)
    (score,) = evaluate(case.label, dataset.cases[1].label).cases
    assert all(one.dice == 1 for one in score.scores.values())
    (tmp_path / "cell_1.h5").unlink()
    assert any("is missing" in one.message for one in examine(dataset).findings)


def test_a_dataset_in_a_file_is_segmented_beside_it(tmp_path, capsys):
    path = written(tmp_path / "scan.h5", attributes={"element_size_um": [0.2, 0.1, 0.1]})
    written(path, ARRAY % 2, "label")
    words = ("--checkpoint", write_checkpoint(tmp_path / "network.pt"), "--devices", "cpu")
    assert run("predict", f"{path}:/raw", *words) == 0
    label = read_label(tmp_path / "scan_seg.h5")
    assert label.array.shape == (50, 40, 7)
    assert label.geometry.spacing_mm == (1e-4, 1e-4, 2e-4)
    capsys.readouterr()
    for output, message in (
        (path, "scan.h5 is also an input; choose another --output"),
        (tmp_path / "new.h5:/seg", "new.h5:/seg: a segmentation ends in"),
    ):
        assert run("predict", f"{path}:/raw", *words, "--overwrite", "-o", output) == 1
        assert message in capsys.readouterr().err
    assert run("predict", path, *words) == 1
    assert "holds several volumes; name one of" in capsys.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} == {"scan.h5", "network.pt", "scan_seg.h5"}


def test_nnunets_layout_may_hold_hdf5(tmp_path):
    for number in range(2):
        for name, array in ((f"imagesTr/{number}_0000", ARRAY), (f"labelsTr/{number}", ARRAY % 2)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            written(tmp_path / f"{name}.h5", array, attributes={"element_size_um": [1, 1, 1]})
    tree = {"labels": {"background": 0, "wall": 1}, "channel_names": {"0": "EM"}}
    write_json(tmp_path / "dataset.json", {**tree, "file_ending": ".h5", "numTraining": 2})
    dataset = load_dataset(tmp_path)
    assert [case.name for case in dataset.cases] == ["0", "1"] and not examine(dataset).findings


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = written(tmp_path / "scan.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    message = refusal(path, open_image)
    assert message == f"reading {path} needs h5py: pip install 'unet3d-parallel[microscopy]'"
