"""The smallest Triton kernel: whether it compiles and runs tells whether the others can."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(x, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < size
    tl.store(x + at, tl.load(x + at, mask=inside) + 1, mask=inside)


def probe(device: torch.device) -> None:
    """Compile a kernel and run it on a GPU.

    Raises:
        RuntimeError: Its result is wrong; Triton itself raises anything.
    """
    x = torch.zeros(3, device=device)
    with torch.cuda.device(device):
        _add_one[(1,)](x, x.numel(), BLOCK=4)
    if x.tolist() != [1.0, 1.0, 1.0]:
        raise RuntimeError("a Triton kernel ran but its result is wrong")
