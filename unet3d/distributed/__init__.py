"""The processes of one training: their places, their messages, starting and stopping them.

Nothing is imported here, so that what needs no PyTorch (`ranks`, `launched`) does not load it.
"""
