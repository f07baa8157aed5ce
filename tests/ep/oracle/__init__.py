"""What dispatch and combine return, by plain loops over the inputs of all ranks.

It is written from the description of the interfaces and shares no code with the engine. Inputs of all ranks are lists
by rank; each function tells what one rank receives or gets back.
"""
