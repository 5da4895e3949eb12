"""How often to save a checkpoint: closed forms for memoryless failures."""

from math import exp, expm1, isfinite, sqrt


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Optimal seconds of work between checkpoints; the MTBF if saving takes twice as long or longer.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equation 37.
    """
    _check(save_s, mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - save_s


def useful_share(work_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of wall time spent on useful work, with `work_s` of it between checkpoints.

    Failures may occur at any time, also while a job saves or restarts.

    Source: Daly 2006, equation 20, the complete model of wall time, inverted.
    """
    _check(save_s, mtbf_s)
    if work_s <= 0 or restart_s < 0:
        raise ValueError(f"want work > 0 s and a restart in >= 0 s, got {work_s} s and {restart_s} s")
    return work_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((work_s + save_s) / mtbf_s))


def _check(save_s: float, mtbf_s: float) -> None:
    if not (isfinite(mtbf_s) and mtbf_s > 0 and save_s >= 0):
        raise ValueError(
            f"want a mean time between failures > 0 s and a save in >= 0 s, got {mtbf_s} s and {save_s} s"
        )
