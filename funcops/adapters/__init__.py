"""Translation for module-style users: torch.autograd, torch.nn, torch.compile. No mathematics here."""
