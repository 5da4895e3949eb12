"""Convert other tools' recordings to traces, profiles and memory curves, and our traces to their files."""
