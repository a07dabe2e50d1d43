"""Calibrated classifiers of the torch road, without training: top-1 on images they have not seen.

    python -m bench.torch_ptq --weights mobilenet_v2.pth --data IMAGENET [--calib calib --val test]
                              [--methods float_scale mse_powof2] [--calibration 500] [--images N] [--device cpu|cuda]

    float_scale    8 bits; activations with a zero point, weights with a scale for each channel
    mse_powof2     8 bits, power-of-two scales: what an NPU takes

`quark quantize-torch` does the same. DIR has two folders of class folders, one to calibrate on and one to judge by; all
rows are about the same images, and `±` is the standard error of a paired difference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.devices import describe_device
from bench.record import Record, add_record_arguments, say
from quark.vision.quantizing import ClassifierQuantization, ImageOptions, Method, quantize_classifier
from quark.vision.training import Processes, choose_device

HEADER = ["network", "method", "images", "float", "PTQ", "minutes"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--data", type=Path, required=True, help="a folder with those of --calib and --val")
    parser.add_argument("--calib", default="calib")
    parser.add_argument("--val", default="val")
    parser.add_argument("--methods", nargs="+", default=["float_scale", "mse_powof2"], choices=[*Method])
    parser.add_argument("--calibration", type=int, default=500)
    parser.add_argument("--images", type=int, help="to judge by; all where not given")
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    device = choose_device(arguments.device)
    notes = [f"On {describe_device(device)}; calibrated on {arguments.calibration} images."]
    record = Record.begin("torch_ptq", arguments, HEADER, notes)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        for name, given in (("calib", arguments.calib), ("val", arguments.val)):
            (data / name).symlink_to((arguments.data / given).resolve(), target_is_directory=True)
        for method in arguments.methods:
            began = time.perf_counter()
            images = ImageOptions(
                batch_size=arguments.batch_size,
                workers=0,
                calibration=arguments.calibration,
                evaluation=arguments.images,
            )
            places = (arguments.weights, data, Path(folder, "out"))
            request = ClassifierQuantization(arguments.model, *places, method=Method(method), images=images)
            result = quantize_classifier(request, Processes(device=device))
            before, after = (each.scores for each in result.measured)
            pair = before.paired_with(after)
            drop = f"({100 * pair.top1_difference:+.2f} ± {100 * pair.standard_error:.2f})"
            tops = [100 * each.accuracy.top1 for each in (before, after)]
            minutes = (time.perf_counter() - began) / 60
            cells = [f"{tops[0]:.2f}", f"{tops[1]:.2f} {drop}", f"{minutes:.1f}"]
            row = [arguments.model, method, str(before.accuracy.count), *cells]
            say(" ".join(row))
            record.add([row], {"method": method, "float_top1": tops[0], "ptq_top1": tops[1], "minutes": minutes})
    record.finish()


if __name__ == "__main__":
    main()
