# What a box is, a fact a line; runs after interpreter.sh.

echo "cores $(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/memory_kb \1/p' /proc/meminfo 2>/dev/null
echo "disk_free_kb $(df -Pk "$HOME" | awk 'NR == 2 { print $4 }')"

[ -z "$python" ] || "$python" -c '
import platform
print("python", platform.python_version())
try:
    from importlib.metadata import version
    print("torch", version("torch"))
except Exception:
    pass
' 2>/dev/null

# Reports come line by line behind a word; a tool that fails says why in its first line.
report() {
  word=$1
  shift
  command -v "$1" >/dev/null 2>&1 || return 0
  if answer=$("$@" 2>&1); then
    printf '%s\n' "$answer" | sed "s/^/$word /"
  else
    printf '%s\n' "$answer" | sed -n "1s/^/$word-failed /p"
  fi
}
report nvidia nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits
report rocm rocm-smi --showproductname --showmeminfo vram --csv
