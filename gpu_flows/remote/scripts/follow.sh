# Send logs of a job until it has ended and they are drained. Usage: follow.sh ID PACE_S MOST (LOG OFFSET)...
# Frames, so that any number of logs share one channel and every byte is counted:
#   data <index> <length>\n<bytes>    beat\n    end\n<the job's description>\n
# MOST bounds a frame, so that one log does not hold up the others.

id=$1 folder=$jobs/$1 pace=$2 most=$3 beaten=0
shift 3
while :; do
  look_at_job "$folder"
  case $phase in STAGED | RUNNING | ORPHANED) over='' ;; *) over=yes ;; esac # before the sizes are read
  todo=$# index=0 again=''
  while [ $todo -gt 0 ]; do
    size=$(stat -c %s "$folder/$1" 2>/dev/null) || size=0
    length=$((size - $2))
    [ $length -le "$most" ] || length=$most again=yes
    if [ $length -gt 0 ]; then
      printf 'data %s %s\n' $index $length &&
        tail -c "+$(($2 + 1))" "$folder/$1" | head -c $length || exit 0
      set -- "$@" "$1" $(($2 + length))
    else
      set -- "$@" "$1" "$2"
    fi
    shift 2
    todo=$((todo - 2)) index=$((index + 1))
  done
  [ -z "$again" ] || continue
  [ -z "$over" ] || break
  # Nobody tells us that the connection is gone but the write that fails.
  now_s
  [ $((now - beaten)) -lt 5 ] || { echo beat || exit 0; beaten=$now; }
  sleep "$pace"
done
echo end
describe "$id"
