"""The memory format of a network: one for all of it."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.products import pairwise
from unet3d.model import Topology, UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, parallelize
from unet3d.parallel.memory_format import memory_format

CPU, GPU, FAKE_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cpu", 0)
LAST, FIRST = torch.channels_last_3d, torch.contiguous_format
CHANNELS = (5, 10)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs a PyTorch with oneDNN"
)


@pytest.mark.parametrize("has_onednn", [True, False])
def test_what_is_lowered_on_a_gpu_or_convolved_by_onednn_has_its_channels_last(
    monkeypatch, has_onednn
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    lowered = LAST if has_onednn else FIRST
    for dtype, on_gpu, on_cpu in (
        (torch.bfloat16, LAST, lowered),
        (torch.float16, LAST, lowered),
        (torch.float32, FIRST, lowered),
        (torch.float64, FIRST, FIRST),
    ):
        formats = [memory_format(device, dtype) for device in (GPU, FAKE_GPU, CPU)]
        assert formats == [on_gpu, on_gpu, on_cpu]


class Formats(TorchDispatchMode):
    """Notes maps that are channels-first, and operations that change the format of one."""

    def __init__(self):
        super().__init__()
        self.first: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        given = {value.data_ptr() for value in args if isinstance(value, Tensor)}
        for value in made if isinstance(made, tuple | list) else (made,):
            # Only the image and the logits have other channels. Views of a map have its format.
            is_map = isinstance(value, Tensor) and value.dim() == 5 and value.shape[1] in CHANNELS
            is_first = is_map and not value.is_contiguous(memory_format=LAST)
            if is_first and value.data_ptr() not in given:
                self.first.append(f"{func} {tuple(value.shape)}")
        return made


@needs_onednn
@pairwise(
    encoder=["plain", "residual"],
    autocast=[torch.bfloat16, None],
    batch_size=[1, 2],
    recompute=["norm", "off", "level"],
)
def test_no_map_of_a_network_changes_its_format(encoder, autocast, batch_size, recompute):
    topology = Topology(
        in_channels=1,
        num_classes=3,
        channels=(*CHANNELS, CHANNELS[-1]),
        strides=((1, 1, 1), (2, 2, 2), (1, 2, 2)),
        encoder=encoder,
        deep_supervision=True,
    )
    layout = Layout(devices=(CPU, CPU), autocast=autocast, recompute=recompute)
    executor = parallelize(UNet3d(topology), layout)
    image = torch.randn(batch_size, 1, 16, 16, 8)
    target = torch.randint(3, (batch_size, 16, 16, 8))
    with Formats() as formats:
        executor.forward_backward(image, target, dice_cross_entropy)
        executor.module.eval()
        executor.predict(image)
    assert formats.first == []
