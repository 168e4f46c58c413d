#!/bin/sh
# Runs a command in a network of its own, with nothing but loopback: engines listen on all interfaces. Where that can't
# be had, it runs as it is.
if unshare --map-root-user --net true 2>/dev/null; then
  exec unshare --map-root-user --net sh -c 'ip link set lo up && exec "$@"' sh "$@"
fi
exec "$@"
