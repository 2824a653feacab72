#!/bin/sh
# Starts a job again until it ends well: supervise.sh torchrun ... train.py --config ...
#
# For what torchrun cannot survive: a lost host of the rendezvous, a link cut for longer than the
# timeouts. Run it on every machine; a run goes on from its last checkpoint. Ctrl-C and SIGTERM are
# passed on, and end it. Settings by environment:
#   RESTARTS=20  starts in a row that last less than SHORT_S, before it gives up
#   SHORT_S=60   seconds after which a start counts as one that went on
#   WAIT_S=5     seconds between an end and the next start
#   STUCK_S=60   seconds after which a torchrun whose ranks are gone is ended: it may wait for ever
#                for a store that it has lost

restarts=${RESTARTS:-20} short_s=${SHORT_S:-60} wait_s=${WAIT_S:-5} stuck_s=${STUCK_S:-60}
left=$restarts stopped='' child=''

stop() {
    stopped=yes
    [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
}
trap stop INT TERM

pause() { # so that a signal is met at once
    sleep "$1" &
    wait $!
}

alive() { # there, and not only waiting to be asked for its exit code
    kill -0 "$1" 2>/dev/null && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"
}

has_ranks() {
    for rank in $(cat /proc/"$child"/task/*/children 2>/dev/null); do
        alive "$rank" && return 0
    done
    return 1
}

watch() { # until the job has ended
    had_ranks='' alone_since=''
    while alive "$child"; do
        pause 1
        if has_ranks; then
            had_ranks=yes alone_since=''
        elif [ -n "$had_ranks" ]; then
            now=$(date +%s)
            alone_since=${alone_since:-$now}
            if [ $((now - alone_since)) -ge "$stuck_s" ] && alive "$child"; then
                echo "supervise: its ranks are gone for $stuck_s s, it is ended" >&2
                kill -KILL "$child" 2>/dev/null
                return
            fi
        fi
    done
}

while :; do
    begun=$(date +%s)
    "$@" &
    child=$!
    watch
    wait "$child"
    code=$?
    child=''
    if [ "$code" -eq 0 ] || [ -n "$stopped" ]; then
        exit "$code"
    fi
    if [ $(($(date +%s) - begun)) -ge "$short_s" ]; then
        left=$restarts
    fi
    if [ "$left" -le 0 ]; then
        echo "supervise: ended with code $code, and no restart is left of $restarts" >&2
        exit "$code"
    fi
    left=$((left - 1))
    echo "supervise: ended with code $code, starts again in $wait_s s ($left restarts left)" >&2
    pause "$wait_s"
    [ -n "$stopped" ] && exit "$code"
done
