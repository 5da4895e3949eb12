"""All measurements on one GPU, by one command that resumes where an earlier call stopped."""
