#!/bin/sh
# Starts `python -m <role> [flags]`. Peers reach a container by its own address, which only the container knows.
set -eu
export TANDEM_ADVERTISE_HOST="${TANDEM_ADVERTISE_HOST:-$(hostname -i | cut -d' ' -f1)}"
exec python -P -m "$@"
