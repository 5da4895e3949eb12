"""MOSS-Transcribe-Diarize's encoder: Whisper's over windows that are filled up with silence."""

from transformers.models.moss_transcribe_diarize.configuration_moss_transcribe_diarize import (
    MossTranscribeDiarizeAudioConfig,
)

from runtime.models.audio import FRAMES_PER_TOKEN, VoxtralAdapter
from runtime.models.encoder import ItemSize
from workbench.model.families.whisper import heard_in_groups


class MossAdapter(VoxtralAdapter):
    """Features are the final norm's output, of the tokens of a clip and of the silence behind it."""

    config_class = MossTranscribeDiarizeAudioConfig
    undivided = "encoders of padded clips do not share tokens over ranks"

    def clip_size(self, frames: int) -> ItemSize:
        """As long as a window, whatever the clip's length; a rest of a group is filled up with silence."""
        heard = -(-min(frames, self.max_frames) // FRAMES_PER_TOKEN)
        return ItemSize(self.max_tokens, heard_in_groups(heard, self.num_merged) // self.num_merged)
