"""Functions that a normalisation's Triton kernels call on one block of voxels by channels."""

import triton
import triton.language as tl


@triton.jit
def place_of(first, row, Z: tl.constexpr, PADS: tl.constexpr):
    """Return the places of voxels in a map, with or without room around Z.

    ``row`` counts voxels from the voxel ``first``. Returns the place of the voxel ``first``, the
    places of all voxels relative to that, and, with PADS, their positions along Z.
    """
    if PADS:
        z = (first % Z).to(tl.int32) + row
        over = z // Z
        return first + 2 * (first // Z) + 1, row + 2 * over, z - over * Z
    return first, row, row


@triton.jit
def start_of(sample, V, Z: tl.constexpr, PADS: tl.constexpr):
    """Return the number of voxels before a sample in memory, including room around Z."""
    if PADS:
        return sample * (V // Z * (Z + 2))
    return sample * V


@triton.jit
def store_block(out, first, row, value, channel, inside, C, Z: tl.constexpr, PADS: tl.constexpr):
    """Store a block of a sample, and with PADS the zeros at both ends of Z."""
    base, place, z = place_of(first, row, Z, PADS)
    at = place[:, None] * C + channel[None, :]
    out += base * C
    value = value.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside)
    if PADS:
        zero = tl.zeros_like(value)
        tl.store(out + at - C, zero, mask=inside & (z == 0)[:, None])
        tl.store(out + at + C, zero, mask=inside & (z == Z - 1)[:, None])


@triton.jit
def load_block(x, first, row, channel, inside, C, Z: tl.constexpr, PADS: tl.constexpr):
    """Load a block of a sample as float32."""
    base, place, _ = place_of(first, row, Z, PADS)
    at = place[:, None] * C + channel[None, :]
    return tl.load(x + base * C + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_affine(weight, bias, means, rstds, sample, channel, known, C):
    """Return mean, scale, shift for (x - mean) * scale + shift, the mean's low part, and rstd."""
    column = sample * C + channel
    mean = tl.load(means + 2 * column, mask=known, other=0.0)
    rest = tl.load(means + 2 * column + 1, mask=known, other=0.0)
    rstd = tl.load(rstds + column, mask=known, other=0.0)
    scale = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32) - rest * scale
    return mean, scale, shift, rest, rstd


@triton.jit
def load_gradient(weight, bias, means, rstds, totals, sample, samples, channel, known, C, COUNT):
    """Return mean, scale and shift, and the other arguments of :func:`gradient_of`."""
    mean, scale, shift, rest, rstd = load_affine(
        weight, bias, means, rstds, sample, channel, known, C
    )
    column, line = sample * C + channel, samples * C
    mean_g = tl.load(totals + column, mask=known, other=0.0) / COUNT
    mean_gx = tl.load(totals + line + column, mask=known, other=0.0) / COUNT
    # (g - mean_g - normal * mean_gx) * scale, where normal is (x - mean - rest) * rstd
    slant = -mean_gx * rstd * scale
    return mean, scale, shift, slant, -mean_g * scale - rest * slant


@triton.jit
def normalized(value, mean, scale, shift, slope):
    """Return a block normalised, with LeakyReLU."""
    value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
    return tl.where(value > 0, value, value * slope)


@triton.jit
def before_activation(g, value, scale, shift, slope):
    """Return a block's gradient before LeakyReLU, from the gradient g after it and x - mean."""
    return tl.where(value * scale[None, :] + shift[None, :] > 0, g, g * slope)


@triton.jit
def gradient_of(g, value, scale, shift, slant, level, slope):
    """Return the gradient of a block of x, from the result's gradient g and x - mean."""
    is_above = value * scale[None, :] + shift[None, :] > 0
    factor = tl.where(is_above, scale[None, :], (scale * slope)[None, :])
    return g * factor + (value * slant[None, :] + level[None, :])


@triton.jit
def before_head(dy, head, row, is_voxel, channel, known, C, BV, BC, K: tl.constexpr):
    """Return the gradient of a block of the normalised map, from dy, the gradient of the logits."""
    g = tl.zeros((BV, BC), tl.float32)
    for k in tl.static_range(K):
        given = tl.load(dy + row * K + k, mask=is_voxel, other=0.0).to(tl.float32)
        of_class = tl.load(head + k * C + channel, mask=known, other=0.0).to(tl.float32)
        g += given[:, None] * of_class[None, :]
    return g
