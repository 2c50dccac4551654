"""Autotuning: tasks out of a program, the schedules they may have, what is predicted and measured of these, and the log
that keeps it.

task, trial                       what is tuned and what was measured, as plain data
space, work, features, roofline   what may be chosen, and what can be said of a choice without measuring
model, forest, choose             the cost model: trained, shipped, and followed where it is sure
surrogate, task_search, scheduler, search   what to measure next, of one task and of all
machine, measure, station, child, worker,
operands, cpu_bench, gpu_bench, launches, look   measuring in processes of their own
deal, ray_runner                  measuring on several machines
record, log, log_edit, replay     the log, and compiling from it
"""
