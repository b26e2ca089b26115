"""From the words on the command line to a checked configuration."""
