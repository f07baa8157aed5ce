"""Computes the results of dispatch and combine by plain loops over the inputs of all ranks.

It is written from the description of the interfaces and shares no code with the engine. Inputs of
all ranks are lists by rank; each function computes the result of one rank.
"""
