# End a job to its last process. Prints left=<processes>, then describes it. Usage: kill.sh ID GRACE_S LIMIT_S

folder=$jobs/$1 left=0
look_at_job "$folder"
before=$phase
if [ "$before" != ABSENT ]; then
  [ "$before" = EXITED ] || [ -e "$folder/.state/cancelled" ] || record "$folder" cancelled "$2"
  # Nobody runs a job whose runner's place is taken.
  mv "$folder/.state/runner.blank" "$folder/.state/runner" 2>/dev/null && unstarted=yes || unstarted=''
  rm -f "$folder/.state/secrets"
  sweep "$folder" "$2" "$3"

  # The runner, if there is one, records the end; not before all are dead.
  now_s
  begun=$now
  look_at_job "$folder"
  while [ "$left" -eq 0 ] && [ "$phase" = RUNNING ] && [ -z "$unstarted" ] && [ $((now - begun)) -lt 10 ]; do
    sleep 0.1
    now_s
    look_at_job "$folder"
  done
  case $before-$phase in
    LOST-* | *-EXITED) ended='' ;; # how a lost job ended stays unknown
    *-RUNNING) ended=$unstarted ;;
    *) ended=yes ;;
  esac
  if [ -n "$ended" ] && [ "$left" -eq 0 ]; then
    record "$folder" exit "137 cancelled $(date +%s) $(stat -c %s "$folder/log")"
  fi
fi
echo "left=$left"
describe "$1"
