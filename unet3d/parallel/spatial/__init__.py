"""One volume over several devices: each has the whole network and a slab of every map."""
