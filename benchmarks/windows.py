"""How many windows a prediction should compute at a time: milliseconds a window, for each number.

    python benchmarks/windows.py --channels 4,8 --shape 64,64,64
    python benchmarks/windows.py --device cuda:0 --shape 128,128,128

The numbers take turns, and times are medians. The largest number that is tried has at most
``--max-voxels`` voxels.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from common import parse_shape, synchronize, tuning_key
from peers import Problem, Trainee, find_variants

from unet3d.memory.allocator import keep_host_memory


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="64,64,64")
    parser.add_argument("--channels", default="32,64,128,256,320")
    parser.add_argument("--variant", default="ours", help="of step.py")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-voxels", type=int, default=2**21)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print a line, write the record."""
    arguments = parse_arguments()
    keep_host_memory()  # as the command line does
    device, size = torch.device(arguments.device), parse_shape(arguments.shape)
    channels = tuple(int(number) for number in arguments.channels.split(","))
    largest = max(1, arguments.max_voxels // math.prod(size))
    counts = [2**power for power in range(largest.bit_length())]
    (variant,) = find_variants(arguments.variant)
    trainees = {
        count: Trainee(variant, Problem(size=size, batch_size=count, channels=channels), [device])
        for count in counts
    }
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(arguments.repeats + 1):
        for count, trainee in trainees.items():
            began = time.perf_counter()
            trainee.window()
            synchronize()
            if repeat:
                seconds[count].append((time.perf_counter() - began) / count)
    medians = {count: statistics.median(values) for count, values in seconds.items()}
    print(f"{arguments.channels} at {arguments.shape}, {trainees[1].precision}: ms a window")
    print("   ".join(f"{count}: {1000 * value:.1f}" for count, value in medians.items()))
    if arguments.json:
        record = tuning_key([device], trainees[1].precision) | {
            "size": size,
            "channels": channels,
            "threads": torch.get_num_threads(),
            "seconds_a_window": medians,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
