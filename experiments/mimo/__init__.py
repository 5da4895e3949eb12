"""Tables and figures of Karnati et al. on heterogeneous parallelism for multimodal models."""
