"""Recordings of other tools become traces, profiles and memory curves; our traces become files of theirs."""
