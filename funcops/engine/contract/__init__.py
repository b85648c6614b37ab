"""The contract of an operator: what a config, an op, residuals and pending weight gradients are, and what a call checks."""
