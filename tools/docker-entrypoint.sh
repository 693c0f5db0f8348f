#!/bin/sh
# What the image runs. A user that it does not know (docker run --user) gets a home of its own, with
# the list of fonts that was made with the image: caches of kernels and plots go there.
set -eu
if [ ! -w "$HOME" ]; then
    HOME=$(mktemp -d /tmp/home-XXXXXX)
    export HOME
    mkdir "$HOME/.cache"
    cp -r /opt/unet3d/cache/matplotlib "$HOME/.cache/"
fi
exec unet3d "$@"
