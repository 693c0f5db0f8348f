"""The first module that the fork server of loading workers imports.

It makes the server end with its parent, even during the seconds in which the server imports the
workers' modules. Importing this module calls :func:`die_with_parent`, because a fork server only
accepts names of modules to import.
"""

from unet3d.distributed.processes import die_with_parent

die_with_parent()
