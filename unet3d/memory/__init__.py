"""What devices hold, measured or followed on tensors without memory.

Nothing is imported here, so that the modules below everything else stay below everything else.
"""
