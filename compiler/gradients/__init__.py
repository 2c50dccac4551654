"""Gradients of models: graphs with their derivatives, and the check of these by differences."""
