"""Functions of programs by name, put here while a compiler traces: it reads an attribute of a module as it is then."""
