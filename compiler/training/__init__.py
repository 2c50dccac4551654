"""Training: a whole iteration as one program (`dnnc.train_step`), and its checkpoints."""
