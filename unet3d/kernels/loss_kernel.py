"""Sums over voxels for a segmentation loss, and their gradient, in Triton.

Forward and backward take one pass over the logits each; probabilities are never stored. With up to
:data:`MAX_UNROLLED` classes, one thread holds all logits of a voxel in registers: so short a row is
not worth dividing among threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 4096
WANTED_PROGRAMS = 1056
UNROLLED_VOXELS = 1024
"""Voxels of a program with unrolled classes."""
MAX_UNROLLED = 8
"""Most classes that are unrolled."""


@triton.jit
def _log_softmax(logits, at, inside, known):
    values = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(known[None, :], values, float("-inf"))
    values = values - tl.max(values, axis=1)[:, None]
    return values - tl.log(tl.sum(tl.exp(values), axis=1))[:, None]


@triton.jit
def _sums(
    logits, target, partial, V, K, RUN, S,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    label = tl.arange(0, BK)
    known = label < K
    surprise = tl.zeros((BK,), tl.float32)
    common = tl.zeros((BK,), tl.float32)
    predicted = tl.zeros((BK,), tl.float32)
    counted = tl.zeros((BK,), tl.float32)
    first = run * RUN
    last = tl.minimum(first + RUN, V)
    for start in range(first, last, BV):
        voxel = start + tl.arange(0, BV)
        is_voxel = voxel < last
        inside = is_voxel[:, None] & known[None, :]
        at = (sample * V + voxel)[:, None] * K + label[None, :]
        logs = _log_softmax(logits, at, inside, known)
        truth = tl.load(target + sample * V + voxel, mask=is_voxel, other=-1).to(tl.int32)
        is_truth = truth[:, None] == label[None, :]
        is_truth = is_truth & inside
        is_counted = truth < K
        chance = tl.where(inside & is_counted[:, None], tl.exp(logs), 0.0)
        surprise += tl.sum(tl.where(is_truth, -logs, 0.0), axis=0)
        common += tl.sum(tl.where(is_truth, chance, 0.0), axis=0)
        predicted += tl.sum(chance, axis=0)
        counted += tl.sum(is_truth.to(tl.float32), axis=0)
    out = partial + ((sample * S + run) * 4) * BK + label
    tl.store(out, surprise)
    tl.store(out + BK, common)
    tl.store(out + 2 * BK, predicted)
    tl.store(out + 3 * BK, counted)


@triton.jit
def _gradient(
    logits, target, out, of_surprise, of_common, of_predicted, V, K,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0).to(tl.int64) * BV + tl.arange(0, BV)
    label = tl.arange(0, BK)
    known = label < K
    is_voxel = voxel < V
    inside = is_voxel[:, None] & known[None, :]
    at = (sample * V + voxel)[:, None] * K + label[None, :]
    truth = tl.load(target + sample * V + voxel, mask=is_voxel, other=-1).to(tl.int32)
    is_counted = truth < K
    chance = tl.exp(_log_softmax(logits, at, inside, known))
    chance = tl.where(inside & is_counted[:, None], chance, 0.0)
    is_truth = truth[:, None] == label[None, :]
    is_truth = (is_truth & inside).to(tl.float32)
    surprise = tl.load(of_surprise + sample * K + label, mask=known, other=0.0)[None, :]
    common = tl.load(of_common + sample * K + label, mask=known, other=0.0)[None, :]
    predicted = tl.load(of_predicted + sample * K + label, mask=known, other=0.0)[None, :]
    wanted = predicted + common * is_truth
    mean = tl.sum(wanted * chance, axis=1)[:, None]
    weight = tl.sum(surprise * is_truth, axis=1)[:, None]
    value = chance * (wanted - mean) + weight * (chance - is_truth)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_unrolled(logits, inside, K: tl.constexpr):
    """Return the largest logit of each voxel, and the sum of exp(logit - largest)."""
    largest = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(1, K):
        largest = tl.maximum(largest, tl.load(logits + k, mask=inside, other=0.0).to(tl.float32))
    total = tl.zeros_like(largest)
    for k in tl.static_range(K):
        total += tl.exp(tl.load(logits + k, mask=inside, other=0.0).to(tl.float32) - largest)
    return largest, total


@triton.jit
def _sums_unrolled(logits, target, partial, V, K: tl.constexpr, BV: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    inside = row < V - block * BV
    first = sample * V + block * BV
    at = logits + first * K + row * K
    truth = tl.load(target + first + row, mask=inside, other=-1).to(tl.int32)
    is_counted = inside & (truth < K)
    largest, total = _softmax_unrolled(at, inside, K)
    log_total = tl.log(total)
    out = partial + (sample * tl.num_programs(0) + block) * 4 * K
    for k in tl.static_range(K):
        above = tl.load(at + k, mask=inside, other=0.0).to(tl.float32) - largest
        chance = tl.where(is_counted, tl.exp(above) / total, 0.0)
        is_truth = truth == k
        tl.store(out + k, tl.sum(tl.where(is_truth, log_total - above, 0.0), axis=0))
        tl.store(out + K + k, tl.sum(tl.where(is_truth, chance, 0.0), axis=0))
        tl.store(out + 2 * K + k, tl.sum(chance, axis=0))
        tl.store(out + 3 * K + k, tl.sum(is_truth.to(tl.float32), axis=0))


@triton.jit
def _gradient_unrolled(
    logits, target, out, of_surprise, of_common, of_predicted, V, K: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    inside = row < V - block * BV
    first = sample * V + block * BV
    at = logits + first * K + row * K
    truth = tl.load(target + first + row, mask=inside, other=-1).to(tl.int32)
    is_counted = truth < K
    largest, total = _softmax_unrolled(at, inside, K)
    mean = tl.zeros_like(largest)
    weight = tl.zeros_like(largest)
    for k in tl.static_range(K):
        value = tl.load(at + k, mask=inside, other=0.0).to(tl.float32)
        chance = tl.where(is_counted, tl.exp(value - largest) / total, 0.0)
        is_truth = (truth == k).to(tl.float32)
        common = tl.load(of_common + sample * K + k)
        mean += chance * (tl.load(of_predicted + sample * K + k) + common * is_truth)
        weight += is_truth * tl.load(of_surprise + sample * K + k)
    for k in tl.static_range(K):
        value = tl.load(at + k, mask=inside, other=0.0).to(tl.float32)
        chance = tl.where(is_counted, tl.exp(value - largest) / total, 0.0)
        is_truth = (truth == k).to(tl.float32)
        common = tl.load(of_common + sample * K + k)
        wanted = tl.load(of_predicted + sample * K + k) + common * is_truth
        value = chance * (wanted - mean) + weight * (chance - is_truth)
        place = out + first * K + row * K + k
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


def forward(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums (4, N, K) of :func:`unet3d.kernels.loss_sums.dice_ce_sums`."""
    logits, target = _laid_out(logits, target)
    n, k = logits.shape[:2]
    voxels = target[0].numel()
    sizes = _sizes(k)
    run = sizes["BV"]
    if k > MAX_UNROLLED:
        run *= triton.cdiv(triton.cdiv(voxels, triton.cdiv(WANTED_PROGRAMS, n)), run)
    runs = triton.cdiv(voxels, run)
    partial = torch.empty((n, runs, 4, sizes.get("BK", k)), device=logits.device)
    given = (logits, target, partial, voxels)
    with torch.cuda.device(logits.device):
        if k <= MAX_UNROLLED:
            _sums_unrolled[(runs, n)](*given, **sizes)
        else:
            _sums[(runs, n)](*given, k, run, runs, **sizes)
    return partial.double().sum(1).float()[..., :k].transpose(0, 1).contiguous()


def backward(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of the logits from the gradient (4, N, K) of the sums."""
    logits, target = _laid_out(logits, target)
    n, k = logits.shape[:2]
    voxels = target[0].numel()
    sizes = _sizes(k)
    out = torch.empty_like(logits, memory_format=torch.channels_last_3d)
    given = (logits, target, out, *gradient.float().contiguous().unbind(0)[:3], voxels)
    grid = (triton.cdiv(voxels, sizes["BV"]), n)
    with torch.cuda.device(logits.device):
        if k <= MAX_UNROLLED:
            _gradient_unrolled[grid](*given, **sizes)
        else:
            _gradient[grid](*given, k, **sizes)
    return out


def _laid_out(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.contiguous(memory_format=torch.channels_last_3d), target.contiguous()


def _sizes(num_classes: int) -> dict[str, int]:
    """Return the sizes of a block for a number of classes."""
    if num_classes <= MAX_UNROLLED:
        return {"K": num_classes, "BV": UNROLLED_VOXELS, "num_warps": 8}
    columns = triton.next_power_of_2(num_classes)
    return {"BV": max(1, BLOCK_ELEMENTS // columns), "BK": columns}
