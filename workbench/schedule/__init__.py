"""Schedules: functions that return the order of actions."""
