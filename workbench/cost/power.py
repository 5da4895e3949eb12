"""Clocks under a power limit: of a device that multiplies all the time, and of the slowest of many."""

from statistics import NormalDist

from workbench.cost.device_limits import PowerLimit

STATIC_SHARE = 0.2  # of the rated power: memory, leakage, links; see `clock_share`
LEAST_VOLTAGE_CLOCK = 0.7  # of the clock at rated power: below, the voltage stays


def clock_share(limit_w: float | None, rated: PowerLimit | None) -> float:
    """The clock under `limit_w` over that under the rated limit; 1 without a limit or above the rated one.

    Switching power goes like clock x voltage^2. Voltage falls with the clock down to the minimum at which
    transistors switch, so power above the static share falls with the third power of the clock, and
    linearly below that point. 700 W to 500 W leaves 87 % of the clock, 1400 W to 500 W 40 %: products on a
    GB300 were measured at 617 of 1,600 TFLOP/s (facebookexperimental/triton, pull request 2023).

    Raises:
        ValueError: a limit for a device of unknown rated power, or one below its static share.
    """
    if limit_w is None:
        return 1.0
    if rated is None:
        raise ValueError(
            f"power_limit_w {limit_w:g}: the profile does not say under which power its rates hold"
        )
    dynamic = (limit_w / rated.rated_w - STATIC_SHARE) / (1.0 - STATIC_SHARE)
    if dynamic <= 0:
        least_w = STATIC_SHARE * rated.rated_w
        raise ValueError(f"power_limit_w must be above {least_w:g} W for this device, got {limit_w:g}")
    knee = LEAST_VOLTAGE_CLOCK**3
    if dynamic < knee:
        return LEAST_VOLTAGE_CLOCK * dynamic / knee
    return float(min(1.0, dynamic ** (1 / 3)))


def slowest_share(num_devices: int, clock_spread: float) -> float:
    """The mean clock of the slowest of `num_devices` devices, over the mean clock; 1 for one device.

    Clocks at a power limit differ from chip to chip. The smallest of n normal draws lies in the mean at the
    quantile (5/8) / (n + 1/4) (Blom 1958, "Statistical Estimates and Transformed Beta-Variables").
    """
    if num_devices == 1:
        return 1.0
    return 1.0 + clock_spread * NormalDist().inv_cdf(0.625 / (num_devices + 0.25))
