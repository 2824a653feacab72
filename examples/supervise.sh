#!/bin/sh
# Restart a job until it succeeds: supervise.sh torchrun ... train_wdl.py --config ...
#
# torchrun fails if the rendezvous host is lost, or if a link is down for longer than the timeouts. Run
# this script on every machine; the job then resumes from the last checkpoint. On Ctrl-C, SIGTERM,
# SIGHUP, or SIGQUIT, the script sends SIGTERM to the job, and ends with the job. Environment variables:
#   RESTARTS=20  give up after this many restarts in a row without a run of SHORT_S seconds
#   SHORT_S=60   a run of at least this many seconds resets the count of restarts
#   WAIT_S=5     seconds between an exit and the next start
#   STUCK_S=60   kill torchrun this many seconds after its ranks have ended: torchrun may wait
#                forever for a lost store

restarts=${RESTARTS:-20} short_s=${SHORT_S:-60} wait_s=${WAIT_S:-5} stuck_s=${STUCK_S:-60}
left=$restarts stopped='' child=''

stop() {
    stopped=yes
    [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
}
trap stop HUP INT QUIT TERM

pause() { # unlike a plain sleep, returns at once on a signal
    sleep "$1" &
    wait $!
}

alive() { # exists and is not a zombie
    kill -0 "$1" 2>/dev/null && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"
}

has_ranks() {
    for rank in $(cat /proc/"$child"/task/*/children 2>/dev/null); do
        alive "$rank" && return 0
    done
    return 1
}

watch() { # returns when the job has ended
    had_ranks='' alone_since=''
    while alive "$child"; do
        pause 1
        if has_ranks; then
            had_ranks=yes alone_since=''
        elif [ -n "$had_ranks" ]; then
            now=$(date +%s)
            alone_since=${alone_since:-$now}
            if [ $((now - alone_since)) -ge "$stuck_s" ] && alive "$child"; then
                echo "supervise: torchrun is still running $stuck_s s after its ranks ended; killing it" >&2
                kill -KILL "$child" 2>/dev/null
                return
            fi
        fi
    done
}

while :; do
    begun=$(date +%s)
    # In its own session, the job does not get the terminal's SIGINT. Otherwise, SIGINT would be its first
    # signal and our SIGTERM its second, which ends it without a save.
    $(command -v setsid) "$@" &
    child=$!
    [ -n "$stopped" ] && kill -TERM "$child" 2>/dev/null
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
        echo "supervise: ended with code $code; giving up after $restarts restarts" >&2
        exit "$code"
    fi
    left=$((left - 1))
    echo "supervise: ended with code $code; restarting in $wait_s s ($left restarts left)" >&2
    pause "$wait_s"
    [ -n "$stopped" ] && exit "$code"
done
