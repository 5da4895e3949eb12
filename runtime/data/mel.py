"""Log-mel spectrograms as input of Whisper, in plain torch."""

import math

import torch
from torch import Tensor

SAMPLE_HZ = 16_000
WINDOW = 400  # samples of 25 ms
HOP = 160  # samples of 10 ms

# Shape suffixes: S = samples, M = mel bins, F = frequencies, T = frames.


def log_mel(wave_S: Tensor, num_bins: int) -> Tensor:
    """[M, T] log10 mel power of a clip at 16 kHz, within 8 decades of its loudest, scaled to about [-1, 1].

    Source: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision",
    section 2.2: 25 ms windows, 10 ms apart; T is S // 160.

    Raises:
        ValueError: a clip shorter than half a window, which cannot be reflected at its ends.
    """
    if len(wave_S) <= WINDOW // 2:
        raise ValueError(f"audio clip: want more than {WINDOW // 2} samples, got {len(wave_S)}")
    window = torch.hann_window(WINDOW, dtype=wave_S.dtype)
    spectrum_FT = torch.stft(wave_S, WINDOW, HOP, window=window, return_complex=True)[:, :-1]
    power_FT = spectrum_FT.abs().square()
    mel_MT = mel_filters(num_bins).to(power_FT.dtype).T @ power_FT
    decades_MT = mel_MT.clamp(min=1e-10).log10()
    return (decades_MT.maximum(decades_MT.max() - 8.0) + 4.0) / 4.0


def mel_filters(num_bins: int) -> Tensor:
    """[F, M] triangles between 0 and 8 kHz, even on Slaney's mel scale, each of unit area.

    Source: Slaney 1998, "Auditory Toolbox", technical report 1998-010: linear up to 1 kHz,
    logarithmic above.
    """
    top = _mel_of(SAMPLE_HZ / 2)
    edges_hz = _hz_of(torch.linspace(0.0, top, num_bins + 2, dtype=torch.float64))
    frequencies = torch.linspace(0.0, SAMPLE_HZ / 2, WINDOW // 2 + 1, dtype=torch.float64)
    left, centre, right = edges_hz[:-2], edges_hz[1:-1], edges_hz[2:]
    rising = (frequencies[:, None] - left) / (centre - left)
    falling = (right - frequencies[:, None]) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0.0) * 2.0 / (right - left)


_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def _mel_of(frequency_hz: float) -> float:
    if frequency_hz < _LOG_START_HZ:
        return frequency_hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_MEL + math.log(frequency_hz / _LOG_START_HZ) / _LOG_STEP


def _hz_of(mel: Tensor) -> Tensor:
    above = _LOG_START_HZ * torch.exp(_LOG_STEP * (mel - _LOG_START_MEL))
    return torch.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, above)
