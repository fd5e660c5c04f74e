# Becomes the job. Runs in a session of its own. Usage: job.sh FOLDER

look_at $$
record "$1" pid "$$ $started" # by the job itself: where setsid forks, nobody else knows its pid
# A kill that came before there was anything to kill; one that comes later finds us.
[ ! -e "$1/.state/cancelled" ] || exit 143

set -- "$1" "$(command -v sh)" "$1/command"
# A background process starts with these two ignored, and no shell can undo that; GNU env can.
if env --default-signal=INT,QUIT true 2>/dev/null; then
  set -- "$1" "$(command -v env)" --default-signal=INT,QUIT "$2" "$3"
fi

# From here on only quoted positional parameters: the variables are the user's.
set -a
. "$1/.state/secrets"
rm -f "$1/.state/secrets"
. "$1/.state/env"
set +a
shift
cd && exec "$@"
