"""What acts in a step: precision, clipping, schedule, optimizers, objective, initialisation."""
