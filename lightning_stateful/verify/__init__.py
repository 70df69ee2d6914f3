"""Tries a user's data in real processes: trains, stops, resumes, and compares sample by sample.

Nothing here imports torch or Lightning but what runs in those processes.
"""
