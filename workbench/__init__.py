"""Turns a multimodal training job into one plan; knows neither torch nor a clock."""
