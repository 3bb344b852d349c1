"""Drafts: their training, their evaluation and the checkpoints that ship.

It knows the engine through its public names and transformers; the engine never imports it: the seam
between them is a checkpoint directory.
"""
