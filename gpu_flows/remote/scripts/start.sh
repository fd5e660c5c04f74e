# Stage a job from the tar on stdin, start it unless it has been, and describe it. Usage: start.sh ID
# May be asked any number of times, at once and after lost connections: one staging folder wins by rename,
# one runner wins by rename, and the job runs once.

fail() {
  echo "$1" >&2
  exit 1
}

folder=$jobs/$1
command -v setsid >/dev/null || fail "there is no setsid (package util-linux) on the box"
(umask 077 && mkdir -p "$jobs") || fail "cannot make $jobs"

# Staging folders whose maker is gone: its connection was lost half-way.
for stage in "$jobs"/.stage.*; do
  [ -d "$stage" ] || continue
  maker=${stage##*/.stage.}
  is_alive "${maker%.*}" "${maker#*.}" || rm -rf "$stage"
done

if [ -d "$folder/.state" ]; then
  cat >/dev/null
else
  look_at $$
  stage=$jobs/.stage.$$.$started
  # tar takes a stream that was cut between two members for a whole one; the last member tells.
  if ! (umask 077 && mkdir "$stage" && tar -xmof - -C "$stage") || [ ! -e "$stage/.state/complete" ]; then
    cat >/dev/null
    rm -rf "$stage"
    fail "the job could not be unpacked into $jobs ($(df -Pk "$HOME" | awk 'NR == 2 { print $4 }') KiB free)"
  fi
  # Onto a folder that is not empty the rename fails: exactly one winner.
  mv -T "$stage" "$folder" 2>/dev/null || rm -rf "$stage"
  [ -d "$folder/.state" ] || fail "the job could not be moved to $folder: something else is there"
fi

if [ -e "$folder/.state/runner.blank" ]; then
  setsid sh "$folder/.state/run.sh" "$folder" </dev/null >/dev/null 2>&1 &
  looks=0
  while [ ! -e "$folder/.state/pid" ] && [ ! -e "$folder/.state/exit" ] && [ $looks -lt 100 ]; do
    looks=$((looks + 1))
    sleep 0.05
  done
fi
describe "$1"
