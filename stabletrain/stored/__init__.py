"""What stabletrain reads back from a run folder: each kind of JSON file has one reader, which checks types."""
