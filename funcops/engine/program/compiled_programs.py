"""The functions of programs by name, put here while a compiler traces, as it reads a module's attributes as they are then."""
