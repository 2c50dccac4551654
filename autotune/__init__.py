"""Autotuning: tasks out of a program, the schedules they may have, what is predicted and measured of these, and the log
that keeps it.

search    tasks, trials and outcomes as data; the space of choices; what to measure next, of one task and of all
model     features of a choice, the roofline, and the cost model: trained, shipped, and followed where it is sure
runners   building and measuring: in processes of their own, and on several machines
log       the log that keeps it all, and compiling from it
"""
