"""Networks that neither timm nor transformers has, written out. Each module has a table `NETS` of names and functions
without arguments.
"""
