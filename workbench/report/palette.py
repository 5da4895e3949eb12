"""Colours of modules and passes, distinguishable with colour blindness."""

from collections.abc import Sequence

from workbench.schedule.action import Pass

# Okabe and Ito 2008, "Color Universal Design", in an order that keeps neighbours apart.
HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
NEUTRAL = "#5B6470"
SIMULATED = "#0072B2"
EXECUTED = "#D55E00"

INK = "#1F2933"
PAPER = "#FFFFFF"
BLACK = "#000000"

# Colours of the page by role; text has a contrast of at least 4.5 on `paper` and `wash`.
LIGHT = {
    "ink": INK,
    "soft": "#52606D",
    "faint": "#616E7C",
    "edge": "#CBD2D9",
    "line": "#E4E7EB",
    "wash": "#F5F7FA",
    "paper": PAPER,
    "idle": "#D9DEE4",
    "neutral": NEUTRAL,
    "accent": "#A4133C",
    "on-accent": PAPER,
    "simulated": SIMULATED,
    "executed": EXECUTED,
    "emulated": "#009E73",
}
DARK = {
    "ink": "#E6EAEE",
    "soft": "#AAB4BF",
    "faint": "#98A4B0",
    "edge": "#46515C",
    "line": "#2A333C",
    "wash": "#1C242C",
    "paper": "#12181E",
    "idle": "#3A444E",
    "neutral": "#8B97A3",
    "accent": "#FF7A93",
    "on-accent": "#12181E",
    "simulated": "#4FA3D9",
    "executed": "#F0803C",
    "emulated": "#2DBE94",
}

# Of plots by matplotlib.
PLOT_STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

# Share of the hue that is left after mixing with white (below 1) or black (above 1).
TONES = {Pass.F: 0.45, Pass.B: 1.0, Pass.I: 0.75, Pass.W: 1.35}


def module_hues(modules: Sequence[str]) -> dict[str, str]:
    """A hue for every module, repeating after the sixth."""
    return {module: HUES[index % len(HUES)] for index, module in enumerate(modules)}


def tone(hue: str, kind: Pass) -> str:
    """A pass's shade of the hue: forwards light, full backwards plain, weight gradients dark."""
    strength = TONES.get(kind, 1.0)
    if strength <= 1:
        return mixed(hue, PAPER, strength)
    return mixed(hue, INK, 2 - strength)


def text_on(colour: str) -> str:
    """Black or white, whichever contrasts more: at least 4.5, as WCAG 2.1 requires for small text."""
    return BLACK if contrast(colour, BLACK) >= contrast(colour, PAPER) else PAPER


def contrast(colour: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.1, relative luminance)."""
    dark, light = sorted((_luminance(colour), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def mixed(colour: str, other: str, share: float) -> str:
    """Mix a share of one colour with the rest of the other."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02X}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [_linear(channel / 255) for channel in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
