"""`stabletrain export`: a trained model as files for other programs."""
