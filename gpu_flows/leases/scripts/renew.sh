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
  was=dead p='' t='' why='' fired_at='' age=''
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
found=$was old=$p looks=0
# Its successor leaves again while it sees it alive.
while { [ "$was" = stopped ] || [ "$was" = hung ]; } && [ $looks -lt 50 ]; do
  kill -KILL "$p"
  looks=$((looks + 1))
  sleep 0.1
  look_at_deadman
done
looks=0
if [ "$found" != running ]; then
  setsid=$(command -v setsid)
  $setsid sh deadman.sh "$HOME/.gpu-flows/deadman" </dev/null >/dev/null 2>&1 &
fi
# It may be about to start, or to be dead.
until look_at_deadman && [ "$was" = running ] && [ -n "$age" ] &&
  { [ "$found" = running ] || [ "$p" != "$old" ]; }; do
  looks=$((looks + 1))
  [ $looks -lt 50 ] || { echo "was=$found now=$was"; exit; }
  sleep 0.1
done

# Into its memory; where that cannot be reached, onto the disk. Before the silence: what is armed has been renewed.
{ [ -e "/proc/$p/fd/3" ] && put "/proc/$p/fd/3" "$1"; } 2>/dev/null || put lease "$1"
[ -z "$2" ] || put silence "$2"
read -r silence <silence
echo "was=$found now=$was left=$((left - u + at)) age=$((age + u - at)) silence=$silence why=$why fired_at=$fired_at"
