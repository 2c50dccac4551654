"""Autotuning: tasks out of a program, the schedules they may have, what is predicted and measured of these, and the log that keeps it."""
