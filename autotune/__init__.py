"""Autotuning: tasks of a program, their schedules, predictions and measurements, and the log.

search    tasks, trials and outcomes as data; the space of choices; what to measure next, of one task and of all
model     features of a choice, the roofline, and the cost model: trained, shipped, and followed where it is sure
runners   building and measuring: in processes of their own, and on several machines
log       the log that keeps it all, and compiling from it
"""
