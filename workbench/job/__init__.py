"""The job: the model to train, the machines and the data; and its layouts in other systems' notations."""
