#!/usr/bin/env bash
# Regenerates unet3d/reports/pages/niivue/niivue.js, the viewer of `unet3d report`: NiiVue and its
# dependencies, from the npm registry, in one script. Only the lines below name their versions.
# zarrita, which reads Zarr with a megabyte of WebAssembly, is left out, because pages hold NIfTI
# only. NiiVue's package lacks its licence: check that niivue/LICENSE is still current.
set -euo pipefail
cd "$(dirname "$0")/../unet3d/reports/pages/niivue"

niivue=0.69.0
parts=(
    @lukeed/uuid@2.0.1 @ungap/structured-clone@1.4.0 array-equal@1.0.2 fflate@0.8.3
    gl-matrix@3.4.4 nifti-reader-js@0.8.0
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$work" \
    "@niivue/niivue@$niivue" "${parts[@]}" esbuild@0.25.12
echo 'export {};' > "$work/nothing.js"
(cd "$work" && node_modules/.bin/esbuild node_modules/@niivue/niivue/build/niivue/index.js \
    --bundle --minify --charset=ascii --legal-comments=none --log-level=warning \
    --format=iife --global-name=niivue --alias:zarrita=./nothing.js \
    --banner:js="// NiiVue $niivue, made by tools/vendor_niivue.sh" --outfile=niivue.js)

{
    echo "What niivue.js holds besides NiiVue itself, and the licence of each. Its letters are"
    echo "Roboto's, by Google, under the Apache License 2.0."
    for part in "${parts[@]}"; do
        printf '\n==== %s ====\n\n' "$part"
        find "$work/node_modules/${part%@*}" -maxdepth 1 -iname 'license*' -exec cat {} +
    done
} > "$work/licences.txt"
mv "$work/licences.txt" LICENSES-OF-PARTS.txt
mv "$work/niivue.js" niivue.js
