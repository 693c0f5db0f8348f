#!/bin/sh
# The entry point of the image. An unknown user (docker run --user) gets a new home for caches of
# kernels and plots, with a copy of the image's list of fonts.
set -eu
if [ ! -w "$HOME" ]; then
    HOME=$(mktemp -d /tmp/home-XXXXXX)
    export HOME
    mkdir "$HOME/.cache"
    cp -r /opt/unet3d/cache/matplotlib "$HOME/.cache/"
fi
exec unet3d "$@"
