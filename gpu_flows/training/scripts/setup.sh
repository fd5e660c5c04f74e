# The setup commands, one after the other, in bash where there is one. How they ended goes into setup.exit:
# "<exit code> exit <epoch ms> <number of the command that failed, 0 when all is well>".

. "$GPU_FLOWS_JOB_DIR/interpreter.sh"

gf_record() {
  printf '%s exit %s000 %s\n' "$1" "$(date +%s)" "$2" >"$GPU_FLOWS_JOB_DIR/setup.exit"
}

gf_ended() {
  gf_code=$?
  # A command that ends the shell with 0 would otherwise pass for a training that went well.
  [ "$gf_code" -ne 0 ] || gf_code=1
  gf_record "$gf_code" "$gf_number"
  exit "$gf_code"
}

gf_run() {
  gf_number=$1
  cd -- "$gf_root"
  printf 'gpu-flows: setup %s of %s: %s\n' "$1" "$gf_total" "$2"
  eval "$2"
}

gf_number=0
trap gf_ended EXIT
set -e
