"""The network: topology, blocks, U-Net and loss. Nothing here names a device."""

from unet3d.model.fusing import adding_skips, deferring
from unet3d.model.loss import LossTerms, Regions, SegmentationLoss, dice_cross_entropy
from unet3d.model.network import (
    AfterBlock,
    Block,
    BlockNetwork,
    SequentialNetwork,
    in_running_order,
    run_block,
    run_blocks,
    sequential_blocks,
)
from unet3d.model.topology import Topology, plan_topology
from unet3d.model.unet import Decoder, Encoder, UNet3d

__all__ = [
    "Block",
    "BlockNetwork",
    "AfterBlock",
    "Decoder",
    "Encoder",
    "LossTerms",
    "Regions",
    "SegmentationLoss",
    "SequentialNetwork",
    "Topology",
    "UNet3d",
    "adding_skips",
    "deferring",
    "dice_cross_entropy",
    "in_running_order",
    "plan_topology",
    "run_block",
    "run_blocks",
    "sequential_blocks",
]
