"""Tries a user's data in real processes: trains, stops, resumes, and compares sample by sample."""
