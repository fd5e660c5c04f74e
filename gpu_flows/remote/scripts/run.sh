# The recorder of one job: started under setsid, outlives every connection. Usage: run.sh FOLDER

set +m
folder=$1
cd "$folder/.state" || exit 1
# The lock. A rename has one winner and, unlike mkdir, needs no room on the disk.
mv runner.blank runner 2>/dev/null || exit 0

trap 'interrupted=yes' TERM # caught, not ignored: what is ignored stays ignored in the job
look_at_boot
look_at $$
printf '%-127s\n' "$$ $started $boot" 1<>runner
recorder_started=$started

# How often the kernel killed for want of memory in our own cgroup (which is a container's whole), else on the
# machine.
oom_kills() {
  while IFS=: read -r _ controllers path; do
    case ,$controllers, in
      ,,) set -- "/sys/fs/cgroup$path/memory.events" /sys/fs/cgroup/memory.events ;;
      *,memory,*) set -- "/sys/fs/cgroup/memory$path/memory.oom_control" /sys/fs/cgroup/memory/memory.oom_control ;;
      *) continue ;;
    esac
    for file in "$@"; do
      kills=$(awk '$1 == "oom_kill" { print $2 }' "$file" 2>/dev/null)
      [ -z "$kills" ] || { echo "$kills"; return; }
    done
  done </proc/self/cgroup
  awk '$1 == "oom_kill" { print $2 }' /proc/vmstat
}
oom_before=$(oom_kills)

# A second session, so that a signal to the job's group leaves the recorder alive.
GPU_FLOWS_JOB_ID=${folder##*/} GPU_FLOWS_JOB_DIR=$folder setsid sh job.sh "$folder" \
  >>"$folder/log" 2>&1 </dev/null &
job=$!

# touch needs no room on the disk either.
(
  trap 'kill $sleeper 2>/dev/null; exit' TERM
  while is_alive $$ "$recorder_started"; do
    touch heartbeat
    sleep 5 &
    sleeper=$!
    wait $sleeper
  done
) >/dev/null 2>&1 </dev/null &
heart=$!

code=''
while :; do
  interrupted=''
  wait $job
  status=$?
  # A signal ends a wait early. 127: the status was handed out by the wait before.
  [ $status -eq 127 ] && [ -n "$code" ] || code=$status
  [ -n "$interrupted" ] || break
done
ended_at=$(date +%s)
# Again and again: a signal that comes while a shell forks a subshell may be swallowed.
while kill $heart 2>/dev/null; do sleep 0.02; done
oom_after=$(oom_kills)
rm -f secrets

# What the job left running ends with it. A kill in progress has its own grace, for a rank that still saves.
grace=5
{ read -r grace <cancelled; } 2>/dev/null
case $grace in '' | *[!0-9]*) grace=5 ;; esac
sweep "$folder" "$grace" $((grace + 10))

why=exit
[ "$code" -le 128 ] || why=signal
[ "$code" -eq 0 ] || [ "${oom_after:-0}" -le "${oom_before:-0}" ] || why=oom
[ ! -e cancelled ] || why=cancelled
printf '%-127s\n' "$code $why $ended_at $(stat -c %s "$folder/log")" 1<>exit.blank
sync exit.blank 2>/dev/null
mv exit.blank exit
