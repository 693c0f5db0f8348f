"""``unet3d plan --predict``: what the prediction of a scan takes of each machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.cli.output import show_line, working

if TYPE_CHECKING:
    from unet3d.config import ParallelSettings


def plan_prediction(
    scan: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    parallel: "ParallelSettings",
    device_memory: float | None,
) -> dict[str, Any]:
    """Show what a scan takes of the host and of a GPU, and return the numbers.

    Args:
        scan: Its file, or its files, or a folder of DICOM slices.
        checkpoints: The networks.
        parallel: Where it computes.
        device_memory: GiB of a GPU that need not be here; None: as in this machine.

    Raises:
        Unet3dError: The scan or a network cannot be used, or a device is not there.
    """
    with working("predicting"):
        import torch

        from unet3d.errors import VolumeError
        from unet3d.images.image import open_image
        from unet3d.inference.placing import wanted_precision
        from unet3d.inference.prediction_memory import prediction_memory
        from unet3d.memory.host import available_bytes
        from unet3d.nnunet.loading import load_network
        from unet3d.parallel import ParallelDims, resolve_precision

        networks = [load_network(path) for path in checkpoints]
        image = open_image(scan)
        if device_memory is not None:
            device = torch.device("cuda", 0)
            gpu_bytes = int(device_memory * 1024**3)
            precision = "bfloat16"
        else:
            device = ParallelDims.resolve(parallel).all_devices[0]
            on_gpu = device.type == "cuda"
            gpu_bytes = torch.cuda.mem_get_info(device)[1] if on_gpu else 0
            precision = resolve_precision("auto", [device])
        settings = [one.config.inference for one in networks]
        wanted = [
            wanted_precision(
                one.precision, network.dtype, network.config.training.precision, [device]
            )
            for network, one in zip(networks, settings, strict=True)
        ]
        precisions = [precision if one == "auto" else one for one in wanted]
        try:
            memory = prediction_memory(image, networks, settings, device, precisions, gpu_bytes)
        except VolumeError as error:
            raise VolumeError(f"{scan[0]}: {error}") from error
        record = memory.to_dict(str(device), gpu_bytes, available_bytes())
    from unet3d.reports.plan import prediction_lines

    for line in prediction_lines(record, scan[0].name):
        show_line(line)
    return record
