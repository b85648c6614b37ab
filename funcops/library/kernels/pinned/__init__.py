"""The bodies that kernels run in the mode of `pins`, in files with the names of the declarations, imported on first use."""
