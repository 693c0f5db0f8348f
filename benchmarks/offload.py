"""One training step on one device, with and without skips offloaded in host memory.

    python benchmarks/offload.py --device 0 --shape 256,256,256 --json out.json
    python benchmarks/offload.py --device cpu --shape 32,32,32 --channels 4,8

Each with normalised features made again in backward, as by default, and kept. Times are medians of
steps after a warm-up, each from an idle machine to an idle machine, forward, backward and optimizer
included.
"""

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from parallel import Bench
from torch import Tensor

from unet3d.parallel import Slot
from unet3d.parallel.executor import NoObserver


class Parked(NoObserver):
    """Counts the bytes that are away, and the most that ever were."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def during(self, slot: Slot, kind: str, micro_batch: int) -> AbstractContextManager[None]:
        """Begin anew with each forward pass: at the end of a step memory is given back for good."""
        if kind == "forward":
            self.now = 0
        return super().during(slot, kind, micro_batch)

    def resized(self, tensor: Tensor) -> None:
        """Count a tensor that leaves or returns."""
        num_bytes = tensor.numel() * tensor.element_size()
        is_away = tensor.untyped_storage().nbytes() == 0
        self.now += num_bytes if is_away else -num_bytes
        self.peak = max(self.peak, self.now)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="0")
    parser.add_argument("--shape", default="256,256,256")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run every way and print the table."""
    arguments = parse_arguments()
    arguments.devices = f"{arguments.device},{arguments.device}"
    bench = Bench(arguments)
    device = bench.devices[:1]
    print(f"{'':32} {'ms':>8} {'peak GiB':>9} {'offloaded GiB':>11}")
    for recompute in ("norm", "off"):
        for offload in ("none", "skips"):
            offloaded = Parked()
            options: dict[str, Any] = {"recompute": recompute, "offload": offload}
            name = f"recompute {recompute}, offload {offload}"
            # No graphs: the observer would not be told of what they replay.
            row = bench.measure(
                name, device, num_micro_batches=1, observer=offloaded, cuda_graphs="off", **options
            )
            row |= options
            if row["seconds"] is None:
                print(f"{name:32} does not fit")
                continue
            row["parked_gib"] = offloaded.peak / 2**30
            peaks = " ".join(f"{peak:.2f}" for peak in row["allocated_gib"])
            print(f"{name:32} {1000 * row['seconds']:8.1f} {peaks:>9} {row['parked_gib']:11.2f}")
    if arguments.json:
        bench.write(device, arguments.json)


if __name__ == "__main__":
    main()
