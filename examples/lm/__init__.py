"""The parts of examples/train_lm.py that are not the training loop."""
