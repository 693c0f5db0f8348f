"""The hand-written convolutions on a GPU, against the plain ones in float64.

Tests named ``small`` are few and tiny, so that they also run in a reasonable time under a memory
checker, without PyTorch's caching of allocations::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest -q -p no:cacheprovider -k small tests/kernels/conv/hopper/test_kernels.py
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.comparison import channels_last
from tests.kernels.norm.closed_form import EPS, called
from tests.products import each_value
from unet3d.kernels.conv.hopper import op, reference
from unet3d.kernels.maps import empty_map, has_room, with_padding
from unet3d.kernels.norm import op as norm

pytestmark = pytest.mark.gpu

CHANNELS = [(32, 32), (32, 64), (64, 32), (64, 64)]
"""Numbers of input and output channels."""
SHAPES = [
    # samples and size; 140 samples are more than there are programs
    (1, (16, 16, 16)),
    (1, (1, 5, 3)),
    (2, (37, 45, 51)),
    (3, (20, 33, 40)),
    (140, (3, 4, 5)),
]
SLOPES = [None, 0.01, 1.0]
"""Slopes of LeakyReLU; None: the map is not normalised."""
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
STORED = [
    # type; memory of the map: dense, with room around Z, or planes of a larger one; zeros around X
    (BFLOAT16, "dense", (1, 1)),
    (FLOAT16, "room", (0, 0)),
    (BFLOAT16, "planes", (1, 0)),
    (FLOAT16, "dense", (0, 1)),
    (BFLOAT16, "room", (1, 1)),
]
ROUNDING = {BFLOAT16: (2.5e-3, 3e-3), FLOAT16: (4e-4, 5e-4)}
"""Largest relative error of a map, by norms: rounded once, or also after a normalisation."""
BYTES_OF_LARGE_MAPS = 40 * 2**30

CALLS = {
    "convolve": lambda of, v: of.convolve(
        v.x, v.kernel, *v.affine, *v.halo, slope=v.slope, **v.sides, moments=False
    ),
    "moments": lambda of, v: of.convolve(
        v.x, v.kernel, *v.affine, *v.halo, slope=v.slope, **v.sides, moments=True
    ),
    "moments_of_sum": lambda of, v: added(of, v, copied(v.dy)),
    "input_gradient": lambda of, v: of.input_gradient(
        v.dy, v.kernel, None if v.weight is None else v.x, *v.affine, slope=v.slope, **v.sides
    ),
    "weight_gradient": lambda of, v: (
        of.weight_gradient(v.dy, v.x, *v.affine, *v.halo, slope=v.slope, before=v.before),
    ),
}
"""How to call each operation, with ``of`` the kernels or the reference; the results are tuples.

The map to which a convolution is added is a copy of dy, which has the shape of the result.
"""


def added(of, values, y):
    """Return a map to which a convolution was added, and its moments."""
    moments = of.add_convolution(y, values.x, values.kernel, **values.sides)
    return y, moments


def copied(x):
    """Return a copy, with room around Z if the map has it."""
    return empty_map(x, pads=has_room(x)).copy_(x)


@dataclass(kw_only=True)
class Values:
    """Arguments of the operations."""

    x: torch.Tensor
    dy: torch.Tensor
    kernel: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None
    slope: float
    before: int
    after: int
    preceding: torch.Tensor | None
    following: torch.Tensor | None

    @property
    def halo(self):
        return self.preceding, self.following

    @property
    def affine(self):
        return self.weight, self.bias, self.mean, self.rstd

    @property
    def sides(self):
        return {"before": self.before, "after": self.after}

    def tensors(self):
        """Return the tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if torch.is_tensor(value)}

    def exactly(self, device=None):
        """Return the same values in float64."""
        made = {
            name: value.detach().to(device, torch.float64).contiguous()
            for name, value in self.tensors().items()
        }
        return replace(self, **made)


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def noise(
    channels,
    shape,
    slope=None,
    dtype=BFLOAT16,
    layout="dense",
    sides=(1, 1),
    beside=(False, False),
    *,
    seed=0,
):
    """Return noise for the operations; a map with too few planes has one of zeros on each side.

    ``beside`` says on which sides a map that is normalised has a neighbour's plane instead.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    (inputs, outputs), (samples, size) = channels, shape
    before, after = sides if size[0] + sum(sides) > 2 else (1, 1)
    kernel = random(outputs, inputs, 3, 3, 3) / math.sqrt(27 * inputs)
    weight = bias = mean = rstd = None
    if slope is not None:
        weight, bias = random(inputs), random(inputs)
        exact = 0.5 + random(samples, inputs).double()  # two numbers, as in a normalisation
        mean = torch.stack((exact.float(), (exact - exact.float()).float()), dim=-1)
        rstd = 0.5 + random(samples, inputs).abs()
    halo = [
        laid_out((0.5 + 1.5 * random(samples, inputs, 1, *size[1:])).to(dtype), layout)
        if has_plane and side == 1 and slope is not None
        else None
        for has_plane, side in zip(beside, (before, after), strict=True)
    ]
    return Values(
        x=laid_out((0.5 + 1.5 * random(samples, inputs, *size)).to(dtype), layout),
        dy=laid_out(
            random(samples, outputs, size[0] + before + after - 2, *size[1:]).to(dtype), layout
        ),
        kernel=kernel.to(dtype) if layout == "dense" else channels_last(kernel.to(dtype)),
        weight=weight,
        bias=bias,
        mean=mean,
        rstd=rstd,
        slope=1.0 if slope is None else slope,
        before=before,
        after=after,
        preceding=halo[0],
        following=halo[1],
    )


def laid_out(x, layout):
    """Return a copy of a map that has NaN around it in memory, if the layout has room there."""
    if layout == "room" and x.shape[-1] > 1:
        made = empty_map(x, pads=True)
        with_padding(made).fill_(math.nan)
        return made.copy_(x)
    if layout == "planes" and len(x) == 1:
        return channels_last(F.pad(x, (0, 0, 0, 0, 1, 1), value=math.nan))[:, :, 1:-1]
    return channels_last(x)


@contextmanager
def nan_in_new_memory():
    """Fill new memory with NaN, to detect elements that a kernel does not write."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(name, values):
    """Return the results of an operation, in memory that held NaN."""
    with nan_in_new_memory():
        return CALLS[name](op, values)


def rounding(values):
    return ROUNDING[values.x.dtype][values.weight is not None]


def check_map(y, expected, tolerance):
    """Compare a map by its norm, and check the largest error of a voxel."""
    assert y.shape == expected.shape
    difference = (y.to(expected) - expected).abs()
    error = (difference.norm() / expected.norm()).item()
    assert error <= tolerance, f"relative error {error:.2e}"
    most = (difference.max() / expected.square().mean().sqrt()).item()
    assert most <= 16 * tolerance, f"a voxel is off by {most:.2e} of the deviation"


def check_moments(moments, name, values):
    """Compare the merged moments with moments in float64."""
    exact = values.exactly()
    if values.weight is not None and name != "moments_of_sum":
        # A 16-bit type has few values, and each is rounded the same way at all voxels, which shifts
        # the mean: so normalised values are rounded for the reference, too.
        read = activated(exact.x, *exact.affine, values.slope).to(values.x.dtype)
        none = {"weight": None, "bias": None, "mean": None, "rstd": None}
        beside = {
            name: activated(plane, *exact.affine, values.slope).to(values.x.dtype).double()
            for name in ("preceding", "following")
            if (plane := getattr(exact, name)) is not None
        }
        exact = replace(exact, x=read.double(), **none, **beside)
    expected, _ = CALLS[name](reference, exact)
    n, c, *space = expected.shape
    assert moments.shape[1:] == (4, n, c) and moments.dtype == torch.float32
    count, variance, mean = merged(moments.to(expected))
    voxels = math.prod(space)
    assert torch.equal(count, torch.full_like(count, voxels))
    want, want_mean = torch.var_mean(expected, (2, 3, 4), correction=0)
    # A float32 sum of products is off by about 1e-6 of its terms, and in matrix units always to one
    # side; a value between two 16-bit numbers may be rounded to the other one.
    loose = (1e-5 if values.weight is None else 1e-2) / math.sqrt(voxels)
    error = ((mean - want_mean).abs() / want.sqrt()).max().item()
    assert error <= 5e-6 + loose, f"mean off by {error:.2e} of a deviation"
    error = (variance / want - 1).abs().max().item()
    assert error <= 1e-5 + loose, f"variance off by {error:.2e}"


def activated(x, weight, bias, mean, rstd, slope):
    """Return a map normalised by the formula, with LeakyReLU."""
    rows = (*x.shape[:2], 1, 1, 1)
    value = (x - mean.sum(-1).view(rows)) * rstd.view(rows) * weight.view(-1, 1, 1, 1)
    return F.leaky_relu(value + bias.view(-1, 1, 1, 1), slope)


def merged(moments):
    """Return the count, the variance and the mean (N, C) of moments (P, 4, N, C) in float64."""
    counts, variances, *means = moments.double().unbind(1)
    means, count = sum(means), counts.sum(0)
    mean = (counts * means).sum(0) / count
    return count, (counts * (variances + (means - mean).square())).sum(0) / count, mean


def check_sums(sums, expected, dx):
    """Compare the total sums with sums in float64; matrix units do not round to nearest."""
    assert sums.shape[1:] == expected.shape[1:] and sums.dtype == torch.float32
    terms = dx.abs().sum((2, 3, 4))
    error = ((sums.to(expected).sum(0) - expected.sum(0)).abs() / terms).max().item()
    assert error <= 5e-5, f"sums off by {error:.2e} of their terms"


def check(name, values, device=None):
    """Compare an operation with the plain one in float64, on ``device`` or that of the values."""
    made = run(name, values)
    expected = CALLS[name](reference, values.exactly(device))
    result, wanted = made[0], expected[0]
    if name == "weight_gradient":
        assert (result.shape, result.dtype) == (wanted.shape, torch.float32)
        error = ((result.to(wanted) - wanted).norm() / wanted.norm()).item()
        assert error <= (1e-3 if values.weight is None else rounding(values)), f"{error:.2e}"
        return
    assert result.dtype == values.x.dtype
    if name != "moments_of_sum":
        assert result.is_contiguous(memory_format=torch.channels_last_3d)
    once = ROUNDING[result.dtype][0]
    check_map(result, wanted, once if name == "input_gradient" else rounding(values))
    if name.startswith("moments"):
        check_moments(made[1], name, values)
    elif name == "input_gradient" and values.weight is not None:
        check_sums(made[1], expected[1], wanted)
    else:
        assert len(made[1]) == 0


@each_value(channels=CHANNELS, shape=SHAPES, slope=SLOPES, stored=STORED)
@pytest.mark.parametrize("name", CALLS)
def test_against_float64(name, channels, shape, slope, stored):
    check(name, noise(channels, shape, slope, *stored))


@each_value(
    channels=CHANNELS,
    shape=SHAPES,
    stored=[one for one in STORED if 1 in one[2]],
    beside=[(True, True), (True, False), (False, True)],
)
@pytest.mark.parametrize("name", ["convolve", "moments", "weight_gradient"])
def test_slabs_beside_others_against_float64(name, channels, shape, stored, beside):
    check(name, noise(channels, shape, 0.01, *stored, beside))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("slope", [None, 0.01], ids=str)
@pytest.mark.parametrize(
    ("channels", "shape"),
    [((32, 32), (2, (3, 17, 18))), ((64, 64), (1, (4, 5, 17))), ((32, 64), (1, (1, 5, 3)))],
    ids=str,
)
def test_small_maps(channels, shape, slope, name):
    check(name, noise(channels, shape, slope, layout="room", beside=(False, True)), "cpu")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("channels", [(32, 32), (64, 64)], ids=str)
def test_moments_of_a_large_mean(channels, dtype):
    """The mean is 1450 deviations, and the convolution itself is exact."""
    inputs, outputs = channels
    values = noise(channels, (2, (20, 33, 40)), dtype=dtype)
    values.kernel.zero_()[:, :, 1, 1, 1] = 1 / inputs  # no zeros of the border are read
    values.x.copy_(1 + (values.x > 0.5) / 128)
    _, moments = run("moments", values)
    count, variance, mean = merged(moments)
    expected, _ = CALLS["convolve"](reference, values.exactly())
    want, want_mean = torch.var_mean(expected, (2, 3, 4), correction=0)
    assert (want_mean / want.sqrt()).min() > 1000
    assert ((mean - want_mean).abs() / want.sqrt()).max() < 1e-3
    assert (variance / want - 1).abs().max() < 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_normalisation_merges_moments_and_sums(shape):
    values = noise((32, 64), shape)
    y, moments = run("moments", values)
    voxels = y[0, 0].numel()
    mean, rstd, whole = norm.merge(moments, voxels, EPS)
    _, variance, wanted = merged(moments)
    assert whole.isfinite().all()
    torch.testing.assert_close(mean.double().sum(-1), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-5, atol=0)
    _, sums = run("input_gradient", noise((32, 64), shape, slope=0.01))
    terms = sums.double().abs().sum(0)
    assert ((norm.total(sums) - sums.double().sum(0)).abs() <= 1e-5 * terms).all()


@pytest.mark.parametrize("slope", [None, 0.01], ids=str)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_run_has_the_same_bits(name, channels, slope):
    values = noise(channels, (2, (37, 45, 51)), slope=slope)
    first = CALLS[name](op, values)
    for _ in range(10):
        again = CALLS[name](op, values)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("slope", [None, 0.01], ids=str)
@pytest.mark.parametrize("channels", [(32, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_replays_it_with_other_values(name, channels, slope):
    values, others = (noise(channels, (2, (20, 33, 40)), slope=slope, seed=seed) for seed in (0, 1))
    CALLS[name](op, values)  # compiles and loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = CALLS[name](op, values)
    expected = CALLS[name](op, others)
    for kept, other in zip(values.tensors().values(), others.tensors().values(), strict=True):
        kept.copy_(other)
    for one in made:
        one.fill_(math.nan)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("slope", [None, 0.01], ids=str)
@pytest.mark.parametrize("channels", [(32, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_two_streams_at_once(name, channels, slope):
    both = [noise(channels, (1, (40, 48, 56)), slope=slope, seed=seed) for seed in (0, 1)]
    expected = [CALLS[name](op, values) for values in both]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]
    made = [[], []]
    for _ in range(10):
        for stream, values, results in zip(streams, both, made, strict=True):
            with torch.cuda.stream(stream):
                results.append(CALLS[name](op, values))
    torch.cuda.synchronize()
    for first, runs in zip(expected, made, strict=True):
        for again in runs:
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.multigpu
@pytest.mark.parametrize("slope", [None, 0.01], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_maps_of_a_gpu_that_is_not_the_current_one(name, slope):
    values = noise((32, 64), (2, (20, 33, 40)), slope=slope)
    moved = replace(values, **{key: one.to("cuda:1") for key, one in values.tensors().items()})
    assert torch.cuda.current_device() == 0
    for _ in range(2):  # alternate
        first, second = CALLS[name](op, values), run(name, moved)
        assert {one.device for one in second} == {torch.device("cuda:1")}
        assert all(torch.equal(a, b.to(a.device)) for a, b in zip(first, second, strict=True))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("layout", ["dense", "room"])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_the_operations_are_registered_as_pytorch_wants_it(shape, layout):
    for slope in (None, 0.01):
        v = noise((32, 64), shape, slope=slope, layout=layout)
        options = {"slope": v.slope, **v.sides}
        for moments in (False, True):
            called(op.convolve, v.x, v.kernel, *v.affine, *v.halo, **options, moments=moments)
        x = None if slope is None else v.x
        called(op.input_gradient, v.dy, v.kernel, x, *v.affine, **options)
        called(op.weight_gradient, v.dy, v.x, *v.affine, *v.halo, slope=v.slope, before=v.before)
        called(op.add_convolution, copied(v.dy), v.x, v.kernel, **v.sides)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("samples", "edge", "layout"), [(1, 416, "dense"), (1, 408, "room"), (2, 328, "dense")]
)
def test_maps_of_more_than_2_31_elements(samples, edge, layout):
    """Compares planes at both ends and in the middle, and all moments and sums."""
    if torch.cuda.get_device_properties(0).total_memory < BYTES_OF_LARGE_MAPS:
        pytest.skip("needs 40 GiB of memory")
    torch.cuda.empty_cache()
    channels, middle = 32, edge // 2
    small = noise((channels, channels), (samples, (4, 4, 4)), slope=0.01)
    kernel, affine = small.kernel, small.affine
    x = large_map(samples, channels, edge, layout)
    assert x.numel() > 2**31

    def planes(v, start, stop):
        """Return planes in float64, with zeros outside of the volume."""
        missing = (0, 0, 0, 0, max(0, -start), max(0, stop - edge))
        return F.pad(v[:, :, max(0, start) : stop].double(), missing)

    def parts(*maps):
        """Yield planes of the maps, one plane at a time, in float64."""
        for at in range(edge):
            yield [v[:, :, at : at + 1].double() for v in maps]

    with nan_in_new_memory():
        y, moments = op.convolve(x, kernel, *[None] * 6, slope=1.0, before=1, after=1, moments=True)
    inside = {"slope": 1.0, "before": 0, "after": 0}
    for start in (0, middle, edge - 2):
        given = planes(x, start - 1, start + 3)
        expected, _ = reference.convolve(
            given, kernel.double(), *[None] * 6, **inside, moments=False
        )
        check_map(y[:, :, start : start + 2], expected, ROUNDING[BFLOAT16][0])
    count, variance, mean = merged(moments)
    total, squares = 0, 0
    for (plane,) in parts(y):
        total = total + plane.sum((2, 3, 4))
        squares = squares + plane.square().sum((2, 3, 4))
    want_mean = total / edge**3
    want = squares / edge**3 - want_mean.square()
    assert torch.equal(count, torch.full_like(count, edge**3))
    assert ((mean - want_mean).abs() / want.sqrt()).max() < 1e-5
    assert (variance / want - 1).abs().max() < 1e-4

    dweight = op.weight_gradient(y, x, *[None] * 6, slope=1.0, before=1)
    expected = torch.zeros(channels, channels, 3, 3, 3, dtype=torch.float64, device=x.device)
    for at in range(edge):
        near, plane = F.pad(planes(x, at - 1, at + 2), (1, 1, 1, 1)), planes(y, at, at + 1)
        for tap in torch.cartesian_prod(*[torch.arange(3)] * 3).tolist():
            i, j, k = tap
            read = near[:, :, i : i + 1, j : j + edge, k : k + edge]
            expected[:, :, i, j, k] += torch.einsum("noxyz,nixyz->oi", plane, read)
    assert (dweight - expected).norm() / expected.norm() < 1e-3

    dy, y = y, None
    with nan_in_new_memory():
        dx, sums = op.input_gradient(dy, kernel, x, *affine, slope=0.01, before=1, after=1)
    for start in (0, middle, edge - 2):
        given = planes(dy, start - 1, start + 3)
        inside = {"slope": 1.0, "before": 2, "after": 2}  # so that the reference pads no planes
        expected, _ = reference.input_gradient(given, kernel.double(), None, *[None] * 4, **inside)
        check_map(dx[:, :, start : start + 2], expected, ROUNDING[BFLOAT16][0])
    weight, bias, mean, rstd = (value.double() for value in affine)
    found = torch.zeros(2, samples, channels, dtype=torch.float64, device=x.device)
    for g, read in parts(dx, x):
        normal = (read - mean.sum(-1)[..., None, None, None]) * rstd[..., None, None, None]
        value = normal * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1)
        g = torch.where(value > 0, g, 0.01 * g)
        found += torch.stack((g.sum((2, 3, 4)), (g * normal).sum((2, 3, 4))))
    check_sums(sums, found[None], dx)


def large_map(samples, channels, edge, layout):
    """Return noise in a map, made on the GPU."""
    room = layout == "room"
    shape = (samples, edge, edge, edge + 2 * room, channels)
    whole = torch.randn(shape, dtype=BFLOAT16, device="cuda")
    if room:
        whole[:, :, :, [0, -1]] = math.nan
        whole = whole[:, :, :, 1:-1]
    return whole.permute(0, 4, 1, 2, 3)
