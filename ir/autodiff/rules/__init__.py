"""Vector-Jacobian products by hand, where a form exists that is better than the derived one; records name them."""
