"""A backend of dnnc: kernels as C99, compiled with the system's C compiler."""
