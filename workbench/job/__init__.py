"""The job: what a user wants to train, on what, with which data; its notations in others' words."""
