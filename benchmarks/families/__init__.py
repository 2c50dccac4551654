"""A corpus of architecture families: builders with seeded weights, and a race of dnnc over what they write.

`python -m benchmarks.families build DIR` exports the models, `python -m benchmarks.families.race --models DIR`
compiles, checks and times them. `index.py` holds what both share and needs NumPy alone; torch, timm and transformers
are imported by the builder.
"""
