"""Sums over voxels that a segmentation loss is made of, and their gradient, in Triton.

One pass over the logits each way; the probabilities are never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 4096
WANTED_PROGRAMS = 1056


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
        chance = tl.where(inside, tl.exp(logs), 0.0)
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
    chance = tl.where(inside, tl.exp(_log_softmax(logits, at, inside, known)), 0.0)
    truth = tl.load(target + sample * V + voxel, mask=is_voxel, other=-1).to(tl.int32)
    is_truth = (truth[:, None] == label[None, :]).to(tl.float32)
    surprise = tl.load(of_surprise + sample * K + label, mask=known, other=0.0)[None, :]
    common = tl.load(of_common + sample * K + label, mask=known, other=0.0)[None, :]
    predicted = tl.load(of_predicted + sample * K + label, mask=known, other=0.0)[None, :]
    wanted = predicted + common * is_truth
    mean = tl.sum(wanted * chance, axis=1)[:, None]
    weight = tl.sum(surprise * is_truth, axis=1)[:, None]
    value = chance * (wanted - mean) + weight * (chance - is_truth)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def forward(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums (4, N, K): surprise, intersection, prediction and truth."""
    logits, target = _laid_out(logits, target)
    n, k = logits.shape[:2]
    voxels = target[0].numel()
    block = _block(k)
    run = triton.cdiv(triton.cdiv(voxels, triton.cdiv(WANTED_PROGRAMS, n)), block["BV"])
    run *= block["BV"]
    runs = triton.cdiv(voxels, run)
    partial = torch.empty((n, runs, 4, block["BK"]), device=logits.device)
    with torch.cuda.device(logits.device):
        _sums[(runs, n)](logits, target, partial, voxels, k, run, runs, **block)
    return partial.double().sum(1).float()[..., :k].transpose(0, 1).contiguous()


def backward(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of the logits, from that (4, N, K) of the sums."""
    logits, target = _laid_out(logits, target)
    n, k = logits.shape[:2]
    voxels = target[0].numel()
    block = _block(k)
    out = torch.empty_like(logits, memory_format=torch.channels_last_3d)
    surprise, common, predicted, _ = gradient.float().contiguous().unbind(0)
    with torch.cuda.device(logits.device):
        _gradient[(triton.cdiv(voxels, block["BV"]), n)](
            logits, target, out, surprise, common, predicted, voxels, k, **block
        )
    return out


def _laid_out(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.contiguous(memory_format=torch.channels_last_3d), target.contiguous()


def _block(num_classes: int) -> dict[str, int]:
    columns = triton.next_power_of_2(num_classes)
    return {"BV": max(1, BLOCK_ELEMENTS // columns), "BK": columns}
