"""Random generators: those of the process, and those that objects hold, seeded, found and put back."""
