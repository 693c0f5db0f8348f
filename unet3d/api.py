"""The Python interface: what the commands do, from files or in memory."""

import io
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import nibabel as nib
import numpy as np
import numpy.typing as npt
import torch
from nibabel.spatialimages import SpatialImage
from rich.console import Console

from unet3d.config import Reading, Shape, parsed_value, preset_changes
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, Unet3dError, reason_of
from unet3d.images.geometry import shear_warning
from unet3d.images.image import Image as OpenedImage
from unet3d.images.image import image_of, open_image
from unet3d.images.labels import stored_labels
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.nifti import nibabel_labels, open_array, open_nibabel
from unet3d.images.source import AS_STATED
from unet3d.inference import prediction
from unet3d.inference.job import Progress
from unet3d.inference.networks import Networks
from unet3d.inference.placing import choose_mode
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inputs.reading import read_json
from unet3d.interruption import Interrupted
from unet3d.nnunet.model_files import network_in, networks_in
from unet3d.runs.finding import chosen_folds
from unet3d.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from unet3d.training.request import Request

logger = logging.getLogger(__name__)

FileName = str | os.PathLike[str]

Device: TypeAlias = str | int | torch.device

Folds: TypeAlias = int | str | Sequence[int | str] | None

SETTINGS = {
    "devices": "parallel.devices",
    "parallel": "parallel.mode",
    "window": "inference.window",
    "overlap": "inference.overlap",
    "precision": "inference.precision",
    "tta": "inference.tta",
    "postprocessing": "inference.postprocessing",
    **{name: f"data.reading.{name}" for name in ("spacing_mm", "axes", "time", "level")},
}
"""Options of prediction that are also settings, with the setting's key."""

Image: TypeAlias = FileName | Sequence[FileName] | SpatialImage | npt.NDArray[Any]
"""A file or folder, one file per channel, a nibabel image, or an array."""

_training = Lock()
"""Held while training: PyTorch's random state and thread count belong to the whole process."""


class Segmenter:
    """Segments images with one network or an ensemble, as ``unet3d predict`` does.

    Threads may share it; they segment one image after another.
    """

    def __init__(self, predictor: Predictor, reading: Reading = AS_STATED) -> None:
        """Take a predictor whose networks :func:`load` has placed on devices."""
        self._predictor, self._reading = predictor, reading
        self._lock = Lock()  # one image at a time: networks of an ensemble take turns on a device

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label value except the background."""
        return self._predictor.label_names

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The channels that an image must have, in this order."""
        return tuple(self._predictor.preprocessing.channel_names)

    def segment(self, image: Image, affine: npt.ArrayLike | None = None) -> nib.Nifti1Image:
        """Segment one image.

        Args:
            image: A file or a folder of DICOM slices; several files, one for each channel; a
                nibabel image; or an array of shape (I, J, K), or (I, J, K, C) with channels.
            affine: For an array only: (4, 4), from voxel indices to mm in RAS, as in nibabel.

        Returns:
            The labels on the grid of the image, in its orientation:
            ``numpy.asarray(result.dataobj)`` has their values, ``nibabel.save`` writes them.

        Raises:
            VolumeError: The image cannot be read or used, or its channels do not match the
                networks.
            DoesNotFitError: A device has too little memory.
            CheckpointError: One of several networks cannot be used.
            TypeError: The image has another type, or an affine is missing or not allowed.
        """
        with explaining_memory("the image"):
            volume = _volume(image, affine, self._reading)
            warning = shear_warning(volume.geometry)
            if warning is not None:
                logger.warning("%s", warning)
            with self._lock:
                labels = self._predictor.segment(volume)
            stored = stored_labels(labels, volume.geometry)
            return nibabel_labels(stored, volume.geometry, self.label_names)


def load(
    checkpoint: FileName,
    *others: FileName,
    folds: Folds = None,
    devices: Device | Sequence[Device] | None = None,
    window: Shape | str | None = None,
    overlap: float | None = None,
    precision: str | None = None,
    tta: bool | None = None,
    postprocessing: bool | None = None,
    spacing_mm: Sequence[float] | None = None,
    axes: str | None = None,
    time: int | None = None,
    level: int | None = None,
) -> Segmenter:
    """Load trained networks, and place them on devices of this process.

    Args:
        checkpoint: Checkpoint file; folder of a run, of folds or of checkpoints; or a model of
            nnU-Net, as a folder or an archive.
        others: More checkpoints; the networks are averaged.
        folds: Folds to use, such as 0, ``"0,2"`` or ``[0, 2]``; ``"all"`` or None: all folds. For a
            model of nnU-Net these are the numbered folds, or else ``fold_all``.
        devices: Such as ``"cuda:0"``, 0 or ``"cpu"``. ``"0,1"``: two GPUs, each with a copy of the
            network and a share of the windows; or each with a stage of the network, if the GPUs
            differ or a window does not fit on one. None: the first GPU, or the CPU.
        window: Voxels of a window along X, Y, Z, or ``"whole"``; None: as in training.
        overlap: Overlap of neighbouring windows, as a share of the window; None: as in training.
        precision: Number type of activations, such as ``"float32"``; None: as in training.
        tta: Whether to average over mirror images of each window; None: as in training.
        postprocessing: Whether to keep only the largest component of labels for which validation
            chose that; None: as in training.
        spacing_mm: Spacing along X, Y, Z of files of microscopes; None: as they state.
        axes: Their axes, such as ``"zyx"``; None: as they state.
        time: Their point in time, counted from 0; None: the only one.
        level: Their level of resolution, 0 for the finest; None: the one nearest to the spacing of
            the network.

    Returns:
        The segmenter, with its networks on the devices.

    Raises:
        CheckpointError: A file cannot be used, or the networks do not belong together.
        ConfigError: A setting is refused.
        DeviceError: A device does not exist, or has too little memory.
    """
    if devices is None:
        devices = "cuda:0" if torch.cuda.is_available() else "cpu"
    asked = _settings(
        devices=devices,
        window=window,
        overlap=overlap,
        precision=precision,
        tta=tta,
        postprocessing=postprocessing,
        spacing_mm=spacing_mm,
        axes=axes,
        time=time,
        level=level,
    )
    request = PredictionRequest(settings=asked)
    group = Group(Ranks())
    with ExitStack() as unpacked:
        files = _files((checkpoint, *others), folds, unpacked)
        networks = Networks.read(files, group, request.inference)
        parallel = choose_mode(request.placement, networks, group.ranks)
        if parallel.mode == "spatial":
            # Slabs of a volume need a process for each device, which unet3d predict starts.
            parallel = parallel.model_copy(update={"mode": "model"})
        reading = request.reading(networks.preprocessing.spacing_mm)
        segmenter = Segmenter(Predictor(networks, parallel, group), reading)
        # Unpacked archives must last as long as the segmenter, which reads weights on demand.
        weakref.finalize(segmenter, unpacked.pop_all().close)
    return segmenter


def predict(
    images: FileName | Sequence[FileName],
    checkpoint: FileName | Sequence[FileName],
    *,
    output: FileName | None = None,
    folds: Folds = None,
    devices: Device | Sequence[Device] | None = None,
    **options: Any,
) -> tuple[Path, ...]:
    """Segment files with trained networks, as ``unet3d predict`` does.

    Progress goes to the logger ``unet3d`` at level INFO. If each device needs a process, the
    processes run for the duration of this call.

    Args:
        images: Files, folders of files, or folders of DICOM slices.
        checkpoint: As in :func:`load`; several networks are averaged.
        output: File or folder; None: beside each image, ``scan_seg.nii.gz``.
        folds: As in :func:`load`.
        devices: As in :func:`load`; the option ``parallel`` says what each device holds.
        options: ``parallel``, the settings that :func:`load` takes, and fields of
            :class:`~unet3d.inference.request.PredictionRequest`, such as ``statistics=True``.

    Returns:
        The files of the segmentations, sorted: new ones, and existing ones that were kept.

    Raises:
        Unet3dError: Any error with a known cause; a DatasetError at the end if some of several
            scans could not be segmented.
        TypeError: There is no such option.
    """
    asked = {name: options.pop(name) for name in SETTINGS if name in options}
    unknown = options.keys() - PredictionRequest.model_fields.keys()
    if unknown:
        raise TypeError(f"predict() has no option {', '.join(sorted(unknown))}")
    if options.get("goes_on") and options.get("overwrite"):
        raise ConfigError("goes_on keeps results and overwrite replaces them; drop one")
    with ExitStack() as unpacked:
        files = _files(_several(checkpoint), folds, unpacked)
        request = PredictionRequest.of(
            {
                **options,
                "images": _several(images),
                "checkpoints": files,
                "output": output,
                "settings": _settings(devices=devices, **asked),
            }
        )
        return prediction.predict(
            request,
            Ranks.from_environment(),
            Progress(),
            draw_preview,
            say=lambda line: logger.info("%s", line),
        )


def _settings(devices: Device | Sequence[Device] | None, **asked: Any) -> dict[str, Any]:
    """Return the arguments as settings, dotted key to value."""
    if devices is not None:
        asked["devices"] = names_of(devices)
    return {
        SETTINGS[name]: parsed_value(SETTINGS[name], value)
        for name, value in asked.items()
        if value is not None
    }


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished training run."""

    folder: Path
    """The run's folder, as ``unet3d train`` leaves it."""
    checkpoint: Path
    """The checkpoint of the final network."""
    mean_dice: float | None
    """Mean Dice of the final network on the validation cases; None if no case has a Dice."""
    dice: Mapping[str, float | None]
    """Mean Dice of each label, by name; None if no case has the label."""

    def load(self, devices: Device | Sequence[Device] | None = None) -> Segmenter:
        """Load the final network on devices, as :func:`unet3d.api.load` does."""
        return load(self.folder, devices=devices)


def train(
    dataset: FileName | None = None,
    *,
    output: FileName | None = None,
    config: FileName | None = None,
    preset: str | Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    devices: Device | Sequence[Device] | None = None,
    epochs: int | None = None,
    fold: int | Literal["none"] | None = None,
    init: FileName | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a network, or resume a training run, as ``unet3d train`` does.

    Training on one device, or of one network in stages, runs in this process. If a mode needs a
    process for each device, the processes run for the duration of this call.

    Nothing is printed: progress goes to the logger ``unet3d`` at level INFO. Random state and
    number of threads of PyTorch are restored afterwards. Ctrl-C, SIGTERM and SIGHUP save a
    checkpoint first, but only if the main thread trains. A process trains one network at a time:
    other threads wait.

    Args:
        dataset: Folder of the data set, or its dataset.json; None: built-in phantom heads, or the
            data set of a resumed run.
        output: Folder of the run; None: a new one below ``runs/``, or with ``resume`` the newest.
        config: YAML file of settings; without a GPU, ``auto`` chooses smaller values.
        preset: Names of presets, which override the file.
        settings: Settings that override presets, such as ``{"training.batch_size": 4}``.
        devices: Such as ``"cuda:0"``, 0, ``"cpu"``, or ``"0,1"``; the setting ``parallel.mode``
            says what each device holds. None: the first GPU, or the CPU.
        epochs: Total number of epochs; a larger number extends a resumed run.
        fold: Which fold validates; "none" trains on every case.
        init: Checkpoint, or folder of a run, with whose weights a new run begins.
        resume: Whether to continue the run in ``output``, or the newest one.

    Returns:
        The run, with the Dice of its validation cases.

    Raises:
        Unet3dError: Any error with a known cause, such as a wrong setting (ConfigError) or data set
            (DatasetError).
        KeyboardInterrupt: Ctrl-C; call again with ``resume`` to continue.
        Interrupted: SIGTERM or SIGHUP, likewise.
    """
    # Imported here, because importing the training package takes long.
    from unet3d.training.folds import request_over_folds
    from unet3d.training.request import Request

    ranks = Ranks.from_environment()
    if ranks.world_size > 1:
        raise ConfigError(
            f"torchrun has started {ranks.world_size} ranks, but only the command can join them; "
            "run torchrun -m unet3d train, or name devices here without torchrun"
        )
    named = {
        "data.dataset": dataset,
        "parallel.devices": None if devices is None else tuple(names_of(devices)),
        "training.epochs": epochs,
        "data.fold": fold,
        "training.init": None if init is None else network_in(Path(init)),
    }
    changes = {key: value for key, value in named.items() if value is not None}
    request = Request(
        config_path=None if config is None else Path(config),
        changes={
            **preset_changes([preset] if isinstance(preset, str) else preset),
            **{key: parsed_value(key, value) for key, value in (settings or {}).items()},
            **changes,
        },
        output=None if output is None else Path(output),
        resume=resume,
    )
    over_folds = request_over_folds(request, None, ranks)
    if over_folds is not None:
        raise ConfigError(
            f"{over_folds.output} is a run over several folds; continue it with unet3d train "
            f"--resume --output {over_folds.output}, or name the folder of one fold"
        )
    try:
        with _training, _state_of_torch_kept():
            folder = _train(request, ranks)
            final = read_json(folder.summary).get("final") or {}
    except OSError as error:  # such as a full disk, in the middle of a run
        place = f"{error.filename}: " if error.filename else ""
        raise Unet3dError(f"{place}{reason_of(error)}") from error
    return TrainedRun(
        folder=folder.path.absolute(),
        checkpoint=folder.latest.absolute(),
        mean_dice=final.get("mean_dice"),
        dice=final.get("dice") or {},
    )


def _train(request: "Request", ranks: Ranks) -> RunFolder:
    from unet3d.training.job import train_run
    from unet3d.training.plan import choose_run

    group = Group(ranks)
    run = choose_run(request, group)
    # Lines of started processes are logged at this level; quiet processes write only warnings.
    quiet = not logger.isEnabledFor(logging.INFO)
    level = logging.WARNING if quiet else logging.INFO
    try:
        train_run(
            run,
            group,
            Console(file=io.StringIO()),  # no terminal, so that epochs are logged
            quiet,
            say=lambda line: logger.log(level, "%s", line),
        )
    except Interrupted as interruption:
        if interruption.signal_number != SIGINT:
            raise
        advice = f"; resume=True continues {run.folder.path}" if interruption.can_resume else ""
        raise KeyboardInterrupt(f"stopped{advice}") from None
    return run.folder


@contextmanager
def _state_of_torch_kept() -> Iterator[None]:
    """Restore random state, threads and switches of PyTorch at the end."""
    benchmark, num_threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(num_threads)


def draw_preview(
    path: Path, image: OpenedImage, labels: npt.NDArray[Any], label_names: dict[int, str]
) -> None:
    """Draw a segmentation over its scan into a file."""
    from unet3d.reports.preview import write_preview  # which imports matplotlib

    write_preview(path, image, labels, label_names)


def names_of(devices: Device | Sequence[Device]) -> list[str]:
    """Return devices as settings name them; text may name several, separated by commas."""
    if isinstance(devices, (str, int, torch.device)):
        return str(devices).split(",")
    return [str(device) for device in devices]


def _several(names: FileName | Sequence[FileName]) -> list[Path]:
    if isinstance(names, (str, os.PathLike)):
        return [Path(names)]
    return [Path(name) for name in names]


def _files(paths: Sequence[FileName], folds: Folds, unpacked: ExitStack) -> list[Path]:
    """Return the checkpoints that paths name, each once; the stack deletes unpacked archives."""
    try:
        chosen = chosen_folds(folds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not paths:
        raise ConfigError("no checkpoint is named; name a file, or the folder of a run")
    files = [file for path in paths for file in networks_in(Path(path), chosen, unpacked)]
    return list(dict.fromkeys(files))


def _volume(image: Image, affine: npt.ArrayLike | None, reading: Reading) -> OpenedImage:
    if isinstance(image, np.ndarray) and affine is not None:
        return image_of([open_array(image, affine)])
    if isinstance(image, np.ndarray) or affine is not None:
        raise TypeError("give an affine with a NumPy array, and with nothing else")
    if isinstance(image, SpatialImage):
        return image_of([open_nibabel(image)])
    paths = [image] if isinstance(image, (str, os.PathLike)) else image
    if not isinstance(paths, Sequence) or not paths or not isinstance(paths[0], (str, os.PathLike)):
        raise TypeError(
            f"cannot segment a {type(image).__name__}; give a file, a list of files, an image of "
            "nibabel's, or a NumPy array with its affine"
        )
    return open_image([Path(path) for path in paths], reading=reading)
