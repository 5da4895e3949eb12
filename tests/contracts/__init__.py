"""What every entry of a registry must keep, whoever adds one."""
