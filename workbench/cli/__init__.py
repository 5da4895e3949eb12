"""The commands, by what they are about. Each function is one command; its parameters are its flags."""
