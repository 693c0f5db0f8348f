"""The first module that the server imports from which loading workers are forked.

It ends the server with its parent also while it still imports what the workers need, which takes
seconds. Importing this module is calling :func:`die_with_parent`, because a server can be told
nothing but what to import.
"""

from unet3d.distributed.processes import die_with_parent

die_with_parent()
