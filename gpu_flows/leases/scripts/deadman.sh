# Ends the box when its lease is over, whoever lives or dies elsewhere. POSIX sh. Usage: deadman.sh FOLDER
#
# In FOLDER (~/.gpu-flows/deadman), made by the boot script:
#   conf     deadline (epoch s), length of the lease, tick, pause between attempts, how long one may take (s)
#   destroy  how the box ends itself; halt: what to do when that keeps failing
#   silence  seconds without a renewal that end the box; 0 for no such end
#   lease    changes with every renewal, unless that reaches us through the memory of descriptor 3
#   left     our memory over a restart: boot id, uptime then, seconds left, the end by the wall clock, seconds
#            since the last renewal, the lease then
#   fired    why, when (epoch s) and at which uptime we fired; once there it is never taken back
# All are filled in place: that works on a full disk.

cd "$1" || exit 1
umask 077
trap '' HUP INT QUIT TERM
exec 3>&-
put() { printf '%-127s\n' "$2" 1<>"$1"; }
look() { # PID; sets state and start
  read -r s <"/proc/$1/stat" || return 1
  set -- ${s##*) }
  state=$1 start=${20}
}

# One of us is enough. A stopped one does not count; when it goes on, it sees our name and leaves.
look $$
me="$$ $start"
p=
read -r p t <pid
if [ -n "$p" ] && look "$p" && [ "$start" = "$t" ]; then
  case $state in [ZXTt]) ;; *) exit ;; esac
fi
put pid "$me"

echo -900 >/proc/$$/oom_score_adj
setsid=$(command -v setsid)
# Renewals are written to a nameless file in memory: no full disk stops them, and nothing is left behind.
f=/dev/shm/gpu-flows.$$
if (set -C && : >"$f"); then
  exec 3<>"$f"
  rm -f "$f"
fi

attempt() { # FILE; bounded, since an unreachable API may hang for ever
  out=/dev/null
  (: >"$1.out") && out=$1.out
  $setsid sh "./$1" "$why" >"$out" 2>&1 </dev/null &
  c=$! i=0
  while kill -0 $c && [ $i -lt "$patience" ]; do
    i=$((i + 1))
    sleep 1
  done
  [ $i -lt "$patience" ] || kill -9 -$c || kill -9 $c
}

read -r boot </proc/sys/kernel/random/boot_id
read -r deadline length tick retry patience <conf
read -r u _ </proc/uptime
b= age= n=0 strikes=0
read -r b at left hard age last <left
case $at$left$hard$age in *[!0-9-]*) age= ;; esac # torn by a crash
if [ -z "$age" ]; then
  # The first start, perhaps long after the create. From here on the uptime counts, which nobody sets; a clock
  # that is behind ours cannot give the box more than the length of its lease.
  d=$(date +%s)
  left=$((deadline - d)) b=$boot at=${u%.*} age=0 last=-
  [ $left -le "$length" ] || left=$length
  hard=$((d + left))
fi

while :; do
  p=
  read -r p t <pid
  [ -z "$p" ] || [ "$p $t" = "$me" ] || exit
  read -r u _ </proc/uptime
  u=${u%.*}
  d=$((u - at))
  if [ "$b" != "$boot" ] || [ $d -lt 0 ]; then
    # A reboot: only the wall clock knows how long it took, and it may only shorten what is left.
    d=$((left - hard + $(date +%s)))
    [ $d -ge 0 ] || d=0
    b=$boot
  fi
  at=$u left=$((left - d)) age=$((age + d))

  l= m=
  read -r l <"/proc/$$/fd/3"
  read -r m <lease
  if [ -n "$l$m" ] && [ "$l$m" != "$last" ]; then last=$l$m age=0; fi
  put left "$b $at $left $hard $age $last"

  fired= ttl=
  read -r fired _ <fired
  read -r ttl <silence
  why=$fired
  if [ -z "$why" ]; then
    [ "${ttl:-0}" -le 0 ] || [ $age -lt "$ttl" ] || why=silence
    [ $left -gt 0 ] || why=deadline
  fi

  # Two looks, a tick apart: a single odd reading ends nothing.
  if [ -n "$why" ]; then strikes=$((strikes + 1)); else strikes=0; fi
  if [ $strikes -lt 2 ]; then
    sleep "$tick"
    continue
  fi
  n=$((n + 1))
  [ -n "$fired" ] || put fired "$why $(date +%s) $u"
  attempt destroy
  # Still here: the cloud did not listen. Stop the work at least, then the machine.
  sleep "$retry"
  for p in $(grep -lzF "GPU_FLOWS_JOB_DIR=${1%deadman}jobs/" /proc/[0-9]*/environ); do
    p=${p#/proc/}
    kill -9 "${p%/environ}"
  done
  [ $n -lt 3 ] || attempt halt
done
