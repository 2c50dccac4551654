"""Automatic differentiation: derivatives of scalar and tensor expressions, rules of ops, walks over graphs."""
