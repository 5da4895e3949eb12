"""Takes composite configurations of transformers apart into the modules of a job."""
