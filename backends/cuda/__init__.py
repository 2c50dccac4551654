"""The CUDA backend: operator IR -> CUDA C++ -> cubins, and the runtime that launches them."""
