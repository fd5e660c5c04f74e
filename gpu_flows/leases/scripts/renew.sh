# Renew the box's lease and look after its dead-man. Usage: renew.sh NONCE [SILENCE_S]
# With SILENCE_S the allowed silence is set too; 0 leaves the deadline alone. Prints one line of key=value.

cd "$HOME/.gpu-flows/deadman" 2>/dev/null && [ -s conf ] || { echo was=missing; exit; }
put() { printf '%-127s\n' "$2" 1<>"$1"; }
look() { # PID; sets state and start
  { read -r s <"/proc/$1/stat"; } 2>/dev/null || return 1
  set -- ${s##*) }
  state=$1 start=${20}
}

# Sets was: running, dead, stopped (it still holds the place) or hung (it no longer counts).
look_at_deadman() {
  was=dead p='' t='' why='' fired_at=''
  { read -r p t <pid; } 2>/dev/null
  { read -r why fired_at _ <fired; } 2>/dev/null
  { read -r _ at left _ age _ <left; } 2>/dev/null
  read -r u _ </proc/uptime
  u=${u%.*}
  [ -n "$p" ] && look "$p" && [ "$start" = "$t" ] || return 0
  case $state in
    Z | X) ;;
    T | t) was=stopped ;;
    *)
      was=running
      # While it fires it waits for the cloud.
      [ -n "$why" ] || [ $((u - ${at:-0})) -le $((3 * ${tick%.*} + 15)) ] || was=hung
      ;;
  esac
}

read -r _ _ tick _ <conf
look_at_deadman
found=$was
[ -z "$2" ] || put silence "$2"
if [ "$found" != running ]; then
  case $found in stopped | hung) kill -KILL "$p" ;; esac
  setsid=$(command -v setsid)
  $setsid sh deadman.sh "$HOME/.gpu-flows/deadman" </dev/null >/dev/null 2>&1 &
  old=$p looks=0
  until look_at_deadman && [ "$was" = running ] && [ "$p" != "$old" ] || [ $looks -ge 50 ]; do
    looks=$((looks + 1))
    sleep 0.1
  done
fi
# Into its memory; where that cannot be reached, onto the disk.
{ [ -e "/proc/$p/fd/3" ] && put "/proc/$p/fd/3" "$1"; } 2>/dev/null || put lease "$1"
ttl=''
read -r ttl <silence
echo "was=$found now=$was left=$((left - u + at)) age=$((age + u - at)) silence=$ttl why=$why fired_at=$fired_at"
