"""The commands, grouped by subject. A function `*_command` is a command; its parameters are its flags."""
