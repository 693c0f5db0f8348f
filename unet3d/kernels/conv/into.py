"""Writing what is computed for some planes of a map to their place in it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv.geometry import Slab
from unet3d.kernels.triton_support import operation
from unet3d.memory.fake_devices import is_gpu

_LOW_TYPES = (torch.bfloat16, torch.float16)
"""Types in which cuDNN computes without a choice of precision, nor copies of its own."""
_NO_DILATION = (1, 1, 1)


def put(computed: Tensor, planes: range, x: Tensor, wanted: range) -> None:
    """Copy wanted planes of the computed ones, (N, C, planes, Y, Z), to their place in x."""
    place = x.narrow(2, wanted.start, len(wanted))
    made = computed.narrow(2, wanted.start - planes.start, len(wanted))
    if is_gpu(x.device):
        # A kernel: what copies dense memory otherwise has a quarter of its bandwidth, measured on
        # an H200 in a CUDA graph, and half when it is launched.
        torch.mul(made, 1, out=place)
    else:
        place.copy_(made)


def put_convolved(
    y: Tensor,
    slab: Slab,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: tuple[int, int, int],
) -> None:
    """Convolve the planes x of a slab, and have the wanted ones in their place in y.

    On a GPU cuDNN writes them there; PyTorch's own call would make a copy. The planes of y, the
    result of one sample, before the wanted ones are there and stay; those behind may be
    overwritten. Both are channels-last.
    """
    if not writes_in_place(x):
        put(F.conv3d(x, weight, None, tuple(stride), padding), slab.y, y, slab.wanted)
        return
    earlier = y.narrow(2, slab.y.start, slab.wanted.start - slab.y.start)
    kept = earlier.clone()
    made = y.narrow(2, slab.y.start, len(slab.y))
    _into(made, x, weight, stride, padding)
    earlier.copy_(kept)


def writes_in_place(x: Tensor) -> bool:
    """Return whether convolutions of a tensor can be written to memory that is there.

    Of one channel, strides do not tell the layout that cuDNN is to take.
    """
    return is_gpu(x.device) and x.dtype in _LOW_TYPES and x.shape[1] > 1


def _convolve_into(
    y: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    cudnn = torch.backends.cudnn
    if not x.is_cuda or torch.version.cuda is None or not cudnn.enabled:
        y.copy_(F.conv3d(x, weight, None, tuple(stride), tuple(padding)))
        return
    is_repeatable = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    given = (x, weight, padding, stride, _NO_DILATION, 1, cudnn.benchmark, is_repeatable, False)
    torch.ops.aten.cudnn_convolution.out(*given, out=y)


# PyTorch's own operation that writes to given memory has no fake version.
_into = operation(
    "convolve_into",
    "(Tensor(a!) y, Tensor x, Tensor weight, int[] stride, int[] padding) -> ()",
    _convolve_into,
    lambda *_: None,
    ("cpu", "cuda"),
)
