"""Data sets: which samples a step reads, by its number, and their way to the device."""
