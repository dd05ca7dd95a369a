#!/usr/bin/env bash
# Sets up everything and runs the main job on the bundled demo model: quantize, evaluate, serve, ask, and one table.
#   scripts/demo.sh [FOLDER]     works in FOLDER, or in a new temporary folder, and leaves the packed model there
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

start_seconds=$SECONDS
server=""

stop_server() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
        server=""
    fi
}
trap stop_server EXIT
trap 'exit 130' INT TERM

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# Port 8000 if it is free, else 0: the system chooses.
choose_port() {
    python - <<'PYTHON'
import socket

try:
    socket.create_server(("127.0.0.1", 8000)).close()
except OSError:
    print(0)
else:
    print(8000)
PYTHON
}

# start_server ARGUMENTS: starts `runtime serve` in the background and sets `url` once it answers.
start_server() {
    printf '\n$ runtime serve %s\n' "$*"
    runtime serve "$@" >serve.log 2>&1 &
    server=$!
    url=""
    while [ -z "$url" ]; do
        if ! kill -0 "$server" 2>/dev/null; then
            cat serve.log >&2
            exit 1
        fi
        sleep 0.2
        url="$(sed -n 's/^serving .* at \(http:[^ ]*\).*/\1/p' serve.log)"
    done
    cat serve.log
}

set_up
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    cd "$1"
else
    cd "$(mktemp -d "${TMPDIR:-/tmp}/demo.XXXXXX")"
fi
say "working in $PWD"

run compress quantize --method awq --bits 4
printf '\n$ compress eval --ppl --json >evaluation.json\n'
compress eval --ppl --json >evaluation.json

port="$(choose_port)"
if [ "$port" = 8000 ]; then
    start_server packed/
else
    say "port 8000 is taken; the server takes a free one"
    start_server packed/ --port 0
fi
run python "$repository/scripts/demo_client.py" "$url" --out client.json
stop_server

printf '\n'
python "$repository/scripts/demo_table.py" .
say "
$((SECONDS - start_seconds)) seconds in all. To serve the result again: $repository/.venv/bin/runtime serve $PWD/packed"
