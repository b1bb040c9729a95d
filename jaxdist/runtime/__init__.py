"""Devices, processes, signals, faults and files of a run."""
