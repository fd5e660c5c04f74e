# Which Python trains: sets $python. Sourced before the setup and again before the launch, so that pip, torchrun and
# the script mean the same one, and a virtual environment that the setup activates is used.

has() {
  "$python" -c 'import importlib.util as util, sys; sys.exit(util.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null
}

find_python() {
  python=${VIRTUAL_ENV:-}/bin/python
  [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$python" ] && return
  any=''
  # A login over SSH lacks the PATH that an image sets for its own command, and finds the system's Python first. The
  # last three are where conda images, Vast.ai's PyTorch image and the PyTorch AMIs of AWS keep the one with torch.
  for candidate in python3 python /opt/conda/bin/python3 /venv/main/bin/python3 /opt/pytorch/bin/python3; do
    python=$(command -v "$candidate") || continue
    any=${any:-$python}
    has torch || continue
    case $candidate in /*) PATH=${python%/*}:$PATH ;; esac
    return
  done
  python=$any
}

find_python
