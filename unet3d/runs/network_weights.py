"""The weights that a file has for a network, compared with what the network needs."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from unet3d.inputs.plain_data import listed, printable
from unet3d.model import Topology, UNet3d


def described_network(topology: Topology, model: Mapping[str, Tensor]) -> UNet3d:
    """Return the network on the meta device, if it has the stored parameters and buffers.

    Raises ValueError, in one line, where names, shapes or types differ.
    """
    with torch.device("meta"):
        network = UNet3d(topology)
    if any(value.dtype == torch.float64 for value in model.values()):
        network.double()
    compare_tensors(model, network.state_dict(), _kind)
    return network


def compare_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], kind: Callable[[Tensor], str]
) -> None:
    """Refuse, by a ValueError in one line, tensors of other names, or of another kind."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{printable(name)} is unknown" for name in found if name not in wanted]
    for name, value in wanted.items():
        if name in found and kind(found[name]) != kind(value):
            problems.append(f"{name} is {kind(found[name])} instead of {kind(value)}")
    if problems:
        raise ValueError(listed(problems, 3))


def refuse_non_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse, by a ValueError that names one, weights with NaN or infinite numbers."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ValueError(
                f"the weight {printable(name)} holds numbers that are not finite: the training had "
                "diverged"
            )


def _kind(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return f"{shape} in {str(tensor.dtype).removeprefix('torch.')}"
