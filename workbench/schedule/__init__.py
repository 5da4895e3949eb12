"""Pipeline schedules: functions that return the order of actions."""
