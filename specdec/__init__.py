"""specdec: speculative decoding that says exactly what the target would have said."""
