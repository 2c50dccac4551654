"""The layers of `dnnc.nn`; `dnnc.nn` lists them."""
