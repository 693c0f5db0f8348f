"""Headers of text may hold anything: they are read, with numbers that make sense, or refused."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.itk_headers import META, NRRD, VOXELS, meta_bytes, nrrd_bytes, written
from tests.images.samples import read_or_refuse
from tests.mutations import property_test

TEXTS = st.one_of(
    st.none(),
    st.sampled_from(
        [
            *("", "0", "1", "-1", "3", "4", "99999999999", "1e300", "nan", "inf", "none", "True"),
            *("0 0 0", "1 1 1", "1e300 1 1", "1 0 0 0 1 0 0 0 1", "(1e-300,0,0) (0,1,0) (0,0,1)"),
            *("3 4 5", "5 4 3", "99999999999 1 1", "60 1 1", "gzip", "raw", "big", "um", "RAS"),
            *("float", "uchar", "MET_UCHAR", "MET_DOUBLE", "LOCAL", "/dev/zero", "a.nrrd", "."),
        ]
    ),
    st.text(max_size=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("headers")


META_NAMES = [*META, "ElementDataFile", "HeaderSize", "DistanceUnits"]
NRRD_NAMES = [*NRRD, "space units", "data file", "kinds"]


@partial(property_test, share=1.4)
@given(
    name=st.sampled_from(["a.nrrd", "a.mha", "a.mhd"]),
    voxels=st.sampled_from([None, VOXELS, VOXELS[:50], b""]),
    changes=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=6),
    end=st.one_of(st.none(), st.integers(0, 500)),
    data=st.data(),
)
def test_fields_and_bytes_may_be_anything(folder, name, voxels, changes, end, data):
    bytes_of, names = (nrrd_bytes, NRRD_NAMES) if name == "a.nrrd" else (meta_bytes, META_NAMES)
    fields = data.draw(st.dictionaries(st.sampled_from(names), TEXTS))
    fields = {field.replace(" ", "_"): text for field, text in fields.items()}
    content = bytearray(bytes_of(voxels, **fields))
    for place, value in changes:
        content[place % len(content)] = value
    read_or_refuse(written(folder / name, content[:end]))
