"""Models: transformers defines the architecture; this room brings loading, attention and the forward.

It knows checkpoints, attention modules and tensors. It knows no requests, proposers or sampling.
"""
