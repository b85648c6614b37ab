"""Memory between forward and backward: policies, packed fields, recomputation, and the search for a policy that fits a budget."""
