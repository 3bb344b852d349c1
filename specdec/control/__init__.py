"""What the controller is made of: acceptance, cost, planning, probing and the record of decisions.

It knows integers, probabilities and seconds; no tensors, no models, no clocks of its own.
"""
