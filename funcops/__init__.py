"""funcops: neural-network operators as pure functions, with their backward passes as data."""
