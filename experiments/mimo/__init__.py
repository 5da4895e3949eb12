"""Tables and figures of a paper on layouts of multimodal models.

Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training".
"""
