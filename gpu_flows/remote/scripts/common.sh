# Goes in front of every other script here. POSIX sh; runs under dash, bash and busybox.
#
# A job's folder is ~/.gpu-flows/jobs/<id>. In its .state:
#   runner     pid and start time of the recorder, boot id and start time of PID 1
#   pid        pid and start time of the job itself
#   exit       "<code> <why> <end, epoch s> <bytes of the log>"; the job has ended once this is there
#   cancelled  the seconds of grace that a kill allows; there once a kill was asked for
# Each is made as <name>.blank when the job is staged, filled in place and then renamed: on a full disk that
# still works, where `echo >new` leaves nothing.

jobs=$HOME/.gpu-flows/jobs

# Fill a blank and give it its name.
record() { # FOLDER NAME TEXT
  printf '%-127s\n' "$3" 1<>"$1/.state/$2.blank" && mv "$1/.state/$2.blank" "$1/.state/$2"
}

# 0 and 1 are no jobs: a signal to them would reach everything.
is_pid() { # PID
  case $1 in '' | *[!0-9]* | 0* | 1) return 1 ;; esac
}

# Set state, parent, group, session and started (ticks since boot) of a process; fail when there is none.
look_at() { # PID
  { IFS= read -r stat_line <"/proc/$1/stat"; } 2>/dev/null || return 1
  # A process may be called anything, even with ") " or a line break in it.
  case $stat_line in *') '[A-Za-z]' '*) ;; *) stat_line=$(cat "/proc/$1/stat" 2>/dev/null) ;; esac
  set -- ${stat_line##*) }
  [ $# -ge 20 ] || return 1
  state=$1 parent=$2 group=$3 session=$4 started=${20}
}

# The start time tells a process from a later one with its pid. A zombie is dead, though `kill -0` reaches it.
is_alive() { # PID STARTED
  is_pid "$1" && look_at "$1" && [ "$started" = "$2" ] || return 1
  case $state in Z | X) return 1 ;; esac
}

# Set boot: a reboot changes the first word, a restarted container only the second.
look_at_boot() {
  read -r boot </proc/sys/kernel/random/boot_id
  started=-
  look_at 1
  boot="$boot $started"
}

now_s() { # sets now: seconds that no clock setting moves
  read -r now _ </proc/uptime
  now=${now%.*}
}

# Set phase, code, why, ended_at and final_bytes of a job. Forks nothing, since it is asked again and again.
look_at_job() { # FOLDER
  phase=ABSENT code='' why='' ended_at='' final_bytes='' job_pid='' job_started=''
  [ -d "$1/.state" ] || return 0
  { read -r job_pid job_started <"$1/.state/pid"; } 2>/dev/null
  is_pid "$job_pid" || job_pid=''
  if has_ended "$1"; then return 0; fi
  if [ ! -e "$1/.state/runner" ]; then phase=STAGED; return 0; fi
  runner='' runner_started='' runner_boot=''
  { read -r runner runner_started runner_boot <"$1/.state/runner"; } 2>/dev/null
  if [ -z "$runner" ]; then
    # Taken, and about to be filled in, unless the runner was killed in between.
    phase=RUNNING why=starting
    [ $(($(date +%s) - $(stat -c %Z "$1/.state/runner"))) -lt 10 ] || phase=LOST why=runner-never-started
    return 0
  fi
  if is_alive "$runner" "$runner_started"; then phase=RUNNING; return 0; fi
  look_at_boot
  if [ "$runner_boot" != "$boot" ]; then
    phase=LOST why=container-restarted
    [ "${runner_boot% *}" = "${boot% *}" ] || why=rebooted
  elif is_alive "$job_pid" "$job_started"; then
    phase=ORPHANED why=runner-died
  elif ! has_ended "$1"; then # it may have been recorded since the first look
    phase=LOST why=runner-and-job-died
  fi
}

has_ended() { # FOLDER
  { read -r code why ended_at final_bytes <"$1/.state/exit"; } 2>/dev/null
  [ -z "$final_bytes" ] || phase=EXITED
  [ -n "$final_bytes" ]
}

describe() { # ID
  look_at_job "$jobs/$1"
  [ -n "$final_bytes" ] || final_bytes=$(stat -c %s "$jobs/$1/log" 2>/dev/null)
  echo "id=$1" "state=$phase" "code=$code" "why=$why" "pid=$job_pid" "log_bytes=$final_bytes" \
    "started_at=$(stat -c %Y "$jobs/$1/.state/pid" 2>/dev/null)" "ended_at=$ended_at" \
    "heartbeat_at=$(stat -c %Y "$jobs/$1/.state/heartbeat" 2>/dev/null)" "box_time=$(date +%s)" \
    "free_kb=$(df -Pk "$HOME" 2>/dev/null | awk 'NR == 2 { print $4 }')"
}

# Print the pids of a job's processes: its session and group, whoever has its folder in the environment
# (every rank of torchrun is a session of its own, and a daemon forks twice), and all that descend from these
# (which may have cleared their environment).
members() { # FOLDER
  leader=0 leader_started=''
  { read -r leader leader_started <"$1/.state/pid"; } 2>/dev/null
  # While anybody is left in its group or session the number is not given out again: another start time
  # means that the group is gone.
  is_pid "$leader" && { ! look_at "$leader" || [ "$started" = "$leader_started" ]; } || leader=0
  {
    for entry in /proc/[0-9]*; do
      look_at "${entry#/proc/}" || continue
      case $state in Z | X) ;; *) echo "${entry#/proc/} $parent $group $session" ;; esac
    done
    # After the table: a child that was forked meanwhile shows up here.
    grep -lzxF "GPU_FLOWS_JOB_DIR=$1" /proc/[0-9]*/environ 2>/dev/null
  } | awk -v leader="$leader" -v self=$$ '
    /^\/proc\// { split($1, part, "/"); mine[part[3]]; next }
    { parent[$1] = $2; if (leader > 1 && ($3 == leader || $4 == leader)) mine[$1] }
    END {
      delete mine[1]; delete mine[self]
      do {
        grown = 0
        for (pid in parent) if (!(pid in mine) && (parent[pid] in mine)) { mine[pid]; grown = 1 }
      } while (grown)
      for (pid in mine) print pid
    }'
}

# TERM to each process once, KILL after the grace, until two looks find nothing or the time is up. Some
# processes cannot be killed (a driver that hangs), so the wait is bounded. Sets left to their number.
sweep() { # FOLDER GRACE_S LIMIT_S
  now_s
  begun=$now termed=' ' known='' clean=0
  while :; do
    pids=$(members "$1")
    # Who was found once is not lost with the parent that gave it away.
    for entry in $known; do
      pid=${entry%.*}
      case " $(echo $pids) " in *" $pid "*) continue ;; esac
      ! is_alive "$pid" "${entry#*.}" || pids="$pids $pid"
    done
    if [ -z "$pids" ]; then clean=$((clean + 1)); else clean=0; fi
    [ $clean -lt 2 ] || break
    now_s
    if [ $((now - begun)) -ge "$2" ]; then
      [ -z "$pids" ] || kill -KILL $pids 2>/dev/null
    else
      for pid in $pids; do
        case $termed in *" $pid "*) continue ;; esac
        termed="$termed$pid "
        look_at "$pid" && known="$known $pid.$started"
        kill -TERM "$pid" 2>/dev/null
      done
    fi
    [ $((now - begun)) -lt "$3" ] || break
    [ -z "$pids" ] || sleep 0.1
  done
  set -- $pids
  left=$#
}
