"""How often to save a checkpoint: the closed form for memoryless failures."""

from math import isfinite, sqrt


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Optimal seconds of work between checkpoints; the MTBF if saving takes twice as long or longer.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equation 37.
    """
    if not (isfinite(mtbf_s) and mtbf_s > 0 and save_s >= 0):
        raise ValueError(
            f"want a mean time between failures > 0 s and a save in >= 0 s, got {mtbf_s} s and {save_s} s"
        )
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - save_s
