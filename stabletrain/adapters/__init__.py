"""The public names of `stabletrain/beside/adapters/`."""
