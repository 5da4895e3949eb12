"""Tables and figures of Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training"."""
