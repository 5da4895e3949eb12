"""Builds profiles of devices that nobody measured out of data sheets, and writes those that ship.

`python -m workbench.calibrate.derived [FOLDER]` writes those of `LIKE`, the same bytes every time, after the
measured profiles that ship.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workbench.calibrate.device_sheet import DeviceSheet, check_sheet, shipped_sheet, shipped_sheets
from workbench.calibrate.leave_one_out import RULES, Rule, fits_of
from workbench.calibrate.transfer import rescaled
from workbench.cost.device_limits import FITTED
from workbench.cost.device_names import shipped_device
from workbench.cost.profile import PROFILES, Profile, load_profile, write_profile

LIKE = {
    "A10": "A40",
    "A100-40GB": "A100-80GB",
    "A100-PCIe-80GB": "A100-80GB",
    "A10G": "A40",
    "A800-80GB": "A100-80GB",
    "B200": "H100",
    "B300": "H100",
    "GB200": "H100",
    "GB300": "H100",
    "GH200-144GB": "H100",
    "GH200-96GB": "H100",
    "H100-500W": "H100",
    "H100-96GB-500W": "H100",
    "H100-NVL": "H100",
    "H100-PCIe": "H100",
    "H20": "H100",
    "H800": "H100",
    "L4": "A100-80GB",
    "L40S": "A100-80GB",
    "MI250X": "A100-80GB",
    "MI300X": "H100",
    "MI325X": "H100",
    "MI355X": "H100",
    "RTX-3090": "A40",
    "RTX-4090": "A100-80GB",
    "RTX-PRO-6000": "A100-80GB",
    "V100-16GB": "A100-80GB",
    "V100-32GB": "A100-80GB",
    "V100-PCIe-32GB": "A100-80GB",
}
"""Devices that ship by data sheet -> the measured device whose kernels they are assumed to run."""


# Share of the table's products that training sustains on Blackwell below 1,400 W; others as the device they
# are derived from. Between 0.62 (products of a B200 in MooreThreads/SimuMax, configs/system/
# b200_bf16_ceperm.json @e691807, 49 % of the peak) and 0.89 (Transformer Engine on B300, 70 %), fitted to
# eight rows of Megatron-Bridge (Llama 3 8B).
SUSTAINED_BLACKWELL = {"B200": 0.73, "GB200": 0.73}
_FITTED = f"{FITTED} NVIDIA-NeMo/Megatron-Bridge, Llama 3 8B, between two published rates of products"


def profile_of(sheet: DeviceSheet, like: str, *, name: str | None = None) -> Profile:
    """Derive a device's profile from its data sheet, with the errors of such rescaling as its fits.

    Args:
        sheet: of the device.
        like: a shipped, measured device of the nearest kind.
        name: of the profile; None: the device's.

    Raises:
        ValueError: cells that contradict one another, an unknown device, or one that is itself rescaled.
    """
    check_sheet(sheet, [shipped_sheet(each) for each in shipped_sheets()])
    measured = shipped_device(like, [each for each in shipped_sheets() if each not in LIKE])
    like_sheet = shipped_sheet(measured)
    profile = rescaled(sheet, load_profile(measured), like_sheet)
    rules = [rule for rule in RULES if profile.collectives or rule is not Rule.COLLECTIVES]
    power = profile.power
    if power is not None and sheet.device in SUSTAINED_BLACKWELL:
        share = SUSTAINED_BLACKWELL[sheet.device]
        power = replace(power, sustained_products=share, sustained_source=_FITTED)
    return replace(profile, name=name or sheet.device, power=power, fits=fits_of(sheet, like_sheet, rules))


def main(arguments: Sequence[str]) -> None:
    """Write all derived profiles into the given folder, by default the one they ship in."""
    parser = argparse.ArgumentParser(prog="workbench.calibrate.derived", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=PROFILES)
    folder = parser.parse_args(arguments).folder
    for device, like in LIKE.items():
        write_profile(profile_of(shipped_sheet(device), like), folder / f"{device}.json")
        sys.stdout.write(f"{device}: after {like}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
